"""Who speaks: the API server's front proxy, and for whom.

Room:  what ConfigMap kube-system/extension-apiserver-authentication says, and reading a caller's headers by it. The
       certificate itself was checked by TLS against the CA named there.
Door:  `FrontProxy.read(data)`, then `FrontProxy.user(request)`; a `StatusError` 401 where nobody can be believed.
"""

from collections.abc import Mapping
from urllib.parse import unquote

import msgspec

from gputile.http.messages import Request
from gputile.metrics_api.status import StatusError
from gputile.model.errors import InputError

CA = "requestheader-client-ca-file"
NAMES = "requestheader-allowed-names"
USER, UID = "requestheader-username-headers", "requestheader-uid-headers"
GROUP, EXTRA = "requestheader-group-headers", "requestheader-extra-headers-prefix"
LISTS = msgspec.json.Decoder(tuple[str, ...])


class AuthenticatedUser(msgspec.Struct, frozen=True):
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

    def is_named(self, name: str) -> bool:
        """Whether a certificate of the CA with this common name is the front proxy's."""
        return not self.names or name in self.names

    def user(self, request: Request) -> AuthenticatedUser:
        if not request.is_known:
            raise _unknown("this API is asked through the API server; send the front proxy's client certificate")
        if not self.is_named(request.caller):
            raise _unknown(f"a certificate of {request.caller!r} is not one of the API server's front proxy")
        try:
            user = self._named(request)
        except UnicodeDecodeError:
            raise _unknown("what the front proxy says about whom it asks for is no UTF-8") from None
        if not user.name:
            raise _unknown("the front proxy does not say for whom it asks")
        return user

    def _named(self, request: Request) -> AuthenticatedUser:
        """Go writes names into headers as they are, in UTF-8. A guess could be somebody else's name."""
        groups = tuple(value for header in self.group_headers for value in _values(request, header))
        name, uid = _first(request, self.user_headers), _first(request, self.uid_headers)
        return AuthenticatedUser(name, uid, groups, self._extra(request))

    def _extra(self, request: Request) -> tuple[tuple[str, tuple[str, ...]], ...]:
        found: dict[str, list[str]] = {}
        for name, value in request.fields:
            for prefix in self.extra_prefixes:
                if name.startswith(prefix.encode()):
                    key = unquote(name.decode()[len(prefix) :], errors="strict")
                    found.setdefault(key, []).append(value.decode())
        return tuple((key, tuple(values)) for key, values in sorted(found.items()))


def _first(request: Request, headers: tuple[str, ...]) -> str:
    """Of the first header that has something in it."""
    return next((found for header in headers if (found := next(iter(_values(request, header)), ""))), "")


def _values(request: Request, header: str) -> list[str]:
    return [value.decode() for name, value in request.fields if name == header.encode()]


def _lower(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name.lower() for name in names)


def _unknown(why: str) -> StatusError:
    return StatusError(401, "Unauthorized", why)
