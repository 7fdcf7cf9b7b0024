"""Authorization by SubjectAccessReview: the API server decides, and its answers are cached for a moment.

Equal requests share one review, and the cache of allowed and denied answers is bounded. `StatusError` 403: denied.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from gputile.kube.api import ApiRejected, OutcomeUnknown
from gputile.metrics_api.authentication import AuthenticatedUser
from gputile.metrics_api.status import StatusError

MOST = 4096  # cached answers

Json = dict[str, Any]
Review = Callable[[Json], Awaitable[tuple[bool, str]]]
"""Takes the spec of a SubjectAccessReview; returns whether it is allowed, and the reason."""


class Attributes(msgspec.Struct, frozen=True):
    """The attributes of a request, in the terms of RBAC."""

    verb: str
    group: str
    version: str
    resource: str
    namespace: str = ""
    name: str = ""

    def sentence(self, user: str) -> str:
        where = f'in the namespace "{self.namespace}"' if self.namespace else "at the cluster scope"
        resource = f'resource "{self.resource}" in API group "{self.group}" {where}'
        return f'User "{user}" cannot {self.verb} {resource}'


class CachedReview(msgspec.Struct, frozen=True):
    """The answer to a SubjectAccessReview, and until when it is used."""

    allowed: bool
    why: str
    until: float


class Authorizer:
    """Checks users against the API server's rules, with a cache of its answers."""

    def __init__(self, review: Review, ttl: float, clock: Callable[[], float]) -> None:
        self._review, self._ttl, self._clock = review, ttl, clock
        self._cache: OrderedDict[tuple[AuthenticatedUser, Attributes], CachedReview] = OrderedDict()
        self._reviewing: dict[tuple[AuthenticatedUser, Attributes], asyncio.Future[CachedReview]] = {}

    def __len__(self) -> int:
        return len(self._cache)

    async def check(self, user: AuthenticatedUser, attributes: Attributes) -> None:
        review = await self._cached_review((user, attributes))
        if not review.allowed:
            group, name = attributes.group, attributes.name
            resource = f"{attributes.resource}.{group}"
            named = f'{resource} "{name}"' if name else resource
            why = f": {review.why}" if review.why else ""
            message = f"{named} is forbidden: {attributes.sentence(user.name)}{why}"
            raise StatusError(403, "Forbidden", message, name=name, group=group, kind=attributes.resource)

    async def _cached_review(self, key: tuple[AuthenticatedUser, Attributes]) -> CachedReview:
        cached = self._cache.get(key)
        if cached is not None and self._clock() < cached.until:
            return cached
        reviewing = self._reviewing.get(key)
        if reviewing is None:  # equal requests wait for one review
            reviewing = self._reviewing[key] = asyncio.ensure_future(self._request_review(*key))
            reviewing.add_done_callback(lambda _: self._reviewing.pop(key, None))
        try:
            review = await asyncio.shield(reviewing)
        except (ApiRejected, OutcomeUnknown) as error:
            message = f"SubjectAccessReview failed: {error}; try again"
            raise StatusError(503, "ServiceUnavailable", message) from error
        self._cache[key] = review
        self._cache.move_to_end(key)
        while len(self._cache) > MOST:
            self._cache.popitem(last=False)
        return review

    async def _request_review(self, user: AuthenticatedUser, attributes: Attributes) -> CachedReview:
        spec: Json = {
            "user": user.name,
            "uid": user.uid,
            "groups": list(user.groups),
            "extra": {key: list(values) for key, values in user.extra},
            "resourceAttributes": msgspec.to_builtins(attributes),
        }
        allowed, why = await self._review(spec)
        return CachedReview(allowed, why, self._clock() + self._ttl)
