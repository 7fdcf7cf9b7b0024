"""Who may read what: the API server's own rules, asked by SubjectAccessReview and remembered for a moment.

Room:  one question per user and thing at a time, a bounded memory of yes and no alike.
Door:  `Authorizer.check(user, attributes)`; a `StatusError` 403 where it is a no.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from gputile.kube.api import ApiRejected, OutcomeUnknown
from gputile.metrics_api.authentication import AuthenticatedUser
from gputile.metrics_api.status import StatusError

MOST = 4096  # answers that are remembered

Json = dict[str, Any]
Review = Callable[[Json], Awaitable[tuple[bool, str]]]
"""The spec of a SubjectAccessReview: whether it is allowed, and why (not)."""


class Attributes(msgspec.Struct, frozen=True):
    """What is wanted, in the words of RBAC."""

    verb: str
    group: str
    version: str
    resource: str
    namespace: str = ""
    name: str = ""

    def sentence(self, user: str) -> str:
        where = f'in the namespace "{self.namespace}"' if self.namespace else "at the cluster scope"
        what = f'resource "{self.resource}" in API group "{self.group}" {where}'
        return f'User "{user}" cannot {self.verb} {what}'


class CachedReview(msgspec.Struct, frozen=True):
    allowed: bool
    why: str
    until: float


class Authorizer:
    """See the module's text."""

    def __init__(self, review: Review, remember: float, clock: Callable[[], float]) -> None:
        self._review, self._remember, self._clock = review, remember, clock
        self._known: OrderedDict[tuple[AuthenticatedUser, Attributes], CachedReview] = OrderedDict()
        self._asking: dict[tuple[AuthenticatedUser, Attributes], asyncio.Future[CachedReview]] = {}

    def __len__(self) -> int:
        return len(self._known)

    async def check(self, user: AuthenticatedUser, wanted: Attributes) -> None:
        verdict = await self._verdict((user, wanted))
        if not verdict.allowed:
            whole = f"{wanted.resource}.{wanted.group}"
            named = f'{whole} "{wanted.name}"' if wanted.name else whole
            why = f": {verdict.why}" if verdict.why else ""
            message = f"{named} is forbidden: {wanted.sentence(user.name)}{why}"
            raise StatusError(403, "Forbidden", message, name=wanted.name, group=wanted.group, kind=wanted.resource)

    async def _verdict(self, key: tuple[AuthenticatedUser, Attributes]) -> CachedReview:
        known = self._known.get(key)
        if known is not None and self._clock() < known.until:
            return known
        asking = self._asking.get(key)
        if asking is None:  # many who want the same wait for one answer
            asking = self._asking[key] = asyncio.ensure_future(self._ask(*key))
            asking.add_done_callback(lambda _: self._asking.pop(key, None))
        try:
            verdict = await asyncio.shield(asking)
        except (ApiRejected, OutcomeUnknown) as wrong:
            message = f"whether this is allowed cannot be asked: {wrong}; try again"
            raise StatusError(503, "ServiceUnavailable", message) from wrong
        self._known[key] = verdict
        self._known.move_to_end(key)
        while len(self._known) > MOST:
            self._known.popitem(last=False)
        return verdict

    async def _ask(self, user: AuthenticatedUser, wanted: Attributes) -> CachedReview:
        spec: Json = {
            "user": user.name,
            "uid": user.uid,
            "groups": list(user.groups),
            "extra": {key: list(values) for key, values in user.extra},
            "resourceAttributes": msgspec.to_builtins(wanted),
        }
        allowed, why = await self._review(spec)
        return CachedReview(allowed, why, self._clock() + self._remember)
