"""Authentication by the API server's front proxy: it reads the user of a request from the proxy's headers.

Its configuration is the ConfigMap kube-system/extension-apiserver-authentication. TLS has verified the client
certificate against the CA named there; this module checks its common name. `StatusError` 401: not authenticated.
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
    """The user that the API server has authenticated."""

    name: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()


class FrontProxy(msgspec.Struct, frozen=True, kw_only=True):
    """The trusted front proxy: its CA, its names, and the headers that carry the user."""

    ca: str
    names: tuple[str, ...] = ()  # common names of its certificate; empty: any certificate of the CA
    user_headers: tuple[str, ...] = ("x-remote-user",)
    uid_headers: tuple[str, ...] = ()
    group_headers: tuple[str, ...] = ("x-remote-group",)
    extra_prefixes: tuple[str, ...] = ("x-remote-extra-",)

    @classmethod
    def read(cls, data: Mapping[str, str]) -> "FrontProxy":
        """`InputError` if the API server runs without an aggregation layer, or the ConfigMap is invalid."""
        if not data.get(CA):
            raise InputError(
                f"ConfigMap kube-system/extension-apiserver-authentication: `{CA}` is missing; start kube-apiserver "
                "with the flags --requestheader-client-ca-file and --requestheader-* (docs/metrics-api.md)"
            )
        try:
            names, users, uids, groups, extras = (
                LISTS.decode((data.get(key) or "[]").encode()) for key in (NAMES, USER, UID, GROUP, EXTRA)
            )
        except msgspec.DecodeError as error:
            raise InputError(
                "ConfigMap kube-system/extension-apiserver-authentication: a `requestheader-` key cannot be read; each "
                "must be a JSON list of strings, as kube-apiserver writes it"
            ) from error
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
            raise _unauthorized("no client certificate of the front proxy; send requests through the API server")
        if not self.is_named(request.caller):
            raise _unauthorized(
                f"the client certificate of {request.caller!r} is not one of the API server's front proxy"
            )
        try:
            user = self._read_user(request)
        except UnicodeDecodeError:
            raise _unauthorized("the user headers of the front proxy are not UTF-8") from None
        if not user.name:
            raise _unauthorized("the front proxy sent no user header")
        return user

    def _read_user(self, request: Request) -> AuthenticatedUser:
        """Go writes names into headers as they are, in UTF-8. Decoded leniently, they could become another user's."""
        groups = tuple(value for header in self.group_headers for value in _values(request, header))
        name, uid = _first(request, self.user_headers), _first(request, self.uid_headers)
        return AuthenticatedUser(name, uid, groups, self._extra(request))

    def _extra(self, request: Request) -> tuple[tuple[str, tuple[str, ...]], ...]:
        extra: dict[str, list[str]] = {}
        for name, value in request.fields:
            for prefix in self.extra_prefixes:
                if name.startswith(prefix.encode()):
                    key = unquote(name.decode()[len(prefix) :], errors="strict")
                    extra.setdefault(key, []).append(value.decode())
        return tuple((key, tuple(values)) for key, values in sorted(extra.items()))


def _first(request: Request, headers: tuple[str, ...]) -> str:
    """The value of the first of these headers that is not empty."""
    return next((value for header in headers if (value := next(iter(_values(request, header)), ""))), "")


def _values(request: Request, header: str) -> list[str]:
    return [value.decode() for name, value in request.fields if name == header.encode()]


def _lower(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name.lower() for name in names)


def _unauthorized(why: str) -> StatusError:
    return StatusError(401, "Unauthorized", why)
