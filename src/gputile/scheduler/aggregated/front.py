"""Who speaks: the API server's front proxy, and for whom.

Room:  what ConfigMap kube-system/extension-apiserver-authentication says, and reading a caller's headers by it. The
       certificate itself was checked by TLS against the CA named there.
Door:  `FrontProxy.read(data)`, then `FrontProxy.user(request)`; a `Status` 401 where nobody can be believed.
"""

from collections.abc import Mapping
from urllib.parse import unquote

import msgspec

from gputile.model.errors import InputError
from gputile.scheduler.aggregated.status import Status
from gputile.web.messages import Request

CA = "requestheader-client-ca-file"
NAMES = "requestheader-allowed-names"
USER, UID = "requestheader-username-headers", "requestheader-uid-headers"
GROUP, EXTRA = "requestheader-group-headers", "requestheader-extra-headers-prefix"
LISTS = msgspec.json.Decoder(tuple[str, ...])


class User(msgspec.Struct, frozen=True):
    """Whom the API server has authenticated."""

    name: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()


class FrontProxy(msgspec.Struct, frozen=True, kw_only=True):
    """Whom we believe when it says for whom it asks."""

    ca: str
    names: tuple[str, ...] = ()  # of its certificate; none: any that the CA signed
    user_headers: tuple[str, ...] = ("x-remote-user",)
    uid_headers: tuple[str, ...] = ()
    group_headers: tuple[str, ...] = ("x-remote-group",)
    extra_prefixes: tuple[str, ...] = ("x-remote-extra-",)

    @classmethod
    def read(cls, data: Mapping[str, str]) -> "FrontProxy":
        """`InputError` where the API server runs without an aggregation layer, or nobody can read what is there."""
        if not data.get(CA):
            raise InputError(
                f"ConfigMap kube-system/extension-apiserver-authentication has no `{CA}`; start kube-apiserver with "
                "--requestheader-client-ca-file and its kin (docs/metrics-api.md)"
            )
        try:
            names, users, uids, groups, extras = (
                LISTS.decode((data.get(key) or "[]").encode()) for key in (NAMES, USER, UID, GROUP, EXTRA)
            )
        except msgspec.DecodeError as wrong:
            raise InputError(
                f"ConfigMap kube-system/extension-apiserver-authentication cannot be read: {wrong}"
            ) from wrong
        return cls(
            ca=data[CA],
            names=names,
            user_headers=_lower(users),
            uid_headers=_lower(uids),
            group_headers=_lower(groups),
            extra_prefixes=_lower(extras),
        )

    def user(self, request: Request) -> User:
        if not request.is_known:
            raise _unknown("this API is asked through the API server; send the front proxy's client certificate")
        if self.names and request.caller not in self.names:
            raise _unknown(f"a certificate of {request.caller!r} is not one of the API server's front proxy")
        name = self._first(request, self.user_headers)
        if not name:
            raise _unknown("the front proxy does not say for whom it asks")
        groups = tuple(value for header in self.group_headers for value in request.headers(header))
        return User(name, self._first(request, self.uid_headers), groups, self._extra(request))

    @staticmethod
    def _first(request: Request, names: tuple[str, ...]) -> str:
        return next((found for name in names if (found := request.header(name))), "")

    def _extra(self, request: Request) -> tuple[tuple[str, tuple[str, ...]], ...]:
        found: dict[str, list[str]] = {}
        for name, value in request.fields:
            header = name.decode("latin-1")
            for prefix in self.extra_prefixes:
                if header.startswith(prefix):
                    found.setdefault(unquote(header[len(prefix) :]), []).append(value.decode("latin-1"))
        return tuple((key, tuple(values)) for key, values in sorted(found.items()))


def _lower(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name.lower() for name in names)


def _unknown(why: str) -> Status:
    return Status(401, "Unauthorized", why)
