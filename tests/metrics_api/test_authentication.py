"""Authentication by the front proxy's certificate and headers, and authorization by access reviews."""

import asyncio
from typing import Any

import pytest

from gputile.http.messages import Request
from gputile.kube.api import ApiRejected, Json, OutcomeUnknown
from gputile.metrics_api import authorization
from gputile.metrics_api.authentication import AuthenticatedUser, FrontProxy
from gputile.metrics_api.authorization import Attributes, Authorizer
from gputile.metrics_api.status import StatusError
from gputile.model.errors import InputError
from tests.scheduler.rig import Clock

DATA = {
    "client-ca-file": "another CA",
    "requestheader-client-ca-file": "the CA",
    "requestheader-allowed-names": '["front-proxy-client"]',
    "requestheader-username-headers": '["X-Remote-User"]',
    "requestheader-uid-headers": '["X-Remote-Uid"]',
    "requestheader-group-headers": '["X-Remote-Group"]',
    "requestheader-extra-headers-prefix": '["X-Remote-Extra-"]',
}
FIELDS = [
    (b"x-remote-user", b"jane"),
    (b"x-remote-uid", b"7"),
    (b"x-remote-group", b"dev"),
    (b"x-remote-group", b"system:authenticated"),
    (b"x-remote-extra-scopes%2fa", b"one"),
    (b"x-remote-extra-scopes%2fa", b"two"),
]


def proxied_request(*, known: bool = True, caller: str = "front-proxy-client", fields: Any = FIELDS) -> Request:
    return Request("GET", "/apis", b"", False, known, "", fields, caller)


def test_the_front_proxys_headers_name_the_user() -> None:
    user = FrontProxy.read(DATA).user(proxied_request())
    assert user == AuthenticatedUser("jane", "7", ("dev", "system:authenticated"), (("scopes/a", ("one", "two")),))


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(proxied_request(known=False), id="no-certificate"),
        pytest.param(proxied_request(caller="another-client"), id="another-name"),
        pytest.param(proxied_request(caller=""), id="no-name"),
        pytest.param(proxied_request(fields=[]), id="no-user-header"),
        pytest.param(proxied_request(fields=[(b"x-remote-user", b"")]), id="for-an-empty-name"),
        pytest.param(proxied_request(fields=[(b"x-user", b"jane")]), id="in-another-header"),
        pytest.param(proxied_request(fields=[(b"x-remote-user", b"j\xf6rg")]), id="a-name-that-is-not-utf-8"),
        pytest.param(proxied_request(fields=[*FIELDS, (b"x-remote-group", b"\xff")]), id="a-group-that-is-not-utf-8"),
        pytest.param(
            proxied_request(fields=[(b"x-remote-user", b"jane"), (b"x-remote-uid", b"\xff")]),
            id="a-uid-that-is-not-utf-8",
        ),
        pytest.param(
            proxied_request(fields=[*FIELDS, (b"x-remote-extra-a", b"\xff")]), id="an-extra-that-is-not-utf-8"
        ),
        pytest.param(
            proxied_request(fields=[*FIELDS, (b"x-remote-extra-%ff", b"a")]), id="an-extra-key-that-is-not-utf-8"
        ),
    ],
)
def test_all_other_requests_are_unauthorized(request_: Request) -> None:
    with pytest.raises(StatusError) as error:
        FrontProxy.read(DATA).user(request_)
    assert (error.value.code, error.value.reason) == (401, "Unauthorized")


def test_names_are_utf_8_as_go_writes_them() -> None:
    fields = [
        (b"x-remote-user", "jörg".encode()),
        (b"x-remote-uid", "ü7".encode()),
        (b"x-remote-group", "müller".encode()),
        (b"x-remote-extra-%c3%a4mter", "größe".encode()),
        (b"x-other", b"\xff"),
    ]
    user = FrontProxy.read(DATA).user(proxied_request(fields=fields))
    assert user == AuthenticatedUser("jörg", "ü7", ("müller",), (("ämter", ("größe",)),))


def test_without_names_any_certificate_of_the_ca_is_trusted() -> None:
    front = FrontProxy.read(DATA | {"requestheader-allowed-names": "[]"})
    assert front.user(proxied_request(caller="any-client")).name == "jane"
    with pytest.raises(StatusError):
        front.user(proxied_request(known=False, caller=""))


def test_the_headers_are_configured_by_the_api_server() -> None:
    front = FrontProxy.read(DATA | {"requestheader-username-headers": '["X-Other", "X-User"]'})
    assert front.user(proxied_request(fields=[(b"x-user", b"jane")])).name == "jane"


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        pytest.param({}, "--requestheader-client-ca-file", id="no-aggregation-layer"),
        pytest.param(DATA | {"requestheader-allowed-names": "front"}, "cannot be read", id="no-json"),
        pytest.param(DATA | {"requestheader-allowed-names": '{"a": 1}'}, "cannot be read", id="no-list"),
    ],
)
def test_an_unusable_config_map_is_an_error_that_says_what_to_do(data: dict[str, str], hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        FrontProxy.read(data)


# ---- authorization --------------------------------------------------------------------------------------------------

JANE = AuthenticatedUser("jane", groups=("dev",))
LIST = Attributes("list", "metrics.nvidia.com", "v1alpha1", "podresources", "team-a")


class Rules:
    """The API server's access reviews."""

    def __init__(self, **allowed: bool) -> None:
        self.allowed = allowed
        self.proxied_request: list[Json] = []
        self.broken: Exception | None = None
        self.clock = Clock()
        self.authorizer = Authorizer(self.review, 10.0, self.clock)

    async def review(self, spec: Json) -> tuple[bool, str]:
        self.proxied_request.append(spec)
        await asyncio.sleep(0)
        if self.broken is not None:
            raise self.broken
        return self.allowed.get(spec["user"], False), "because"


async def test_allowed_and_denied_reviews_are_cached_and_expire() -> None:
    rules = Rules(jane=True)
    for _ in range(3):
        await rules.authorizer.check(JANE, LIST)
        with pytest.raises(
            StatusError, match=r'User "joe" cannot list resource "podresources" .* namespace "team-a": because'
        ):
            await rules.authorizer.check(AuthenticatedUser("joe"), LIST)
    assert [spec["user"] for spec in rules.proxied_request] == ["jane", "joe"]
    rules.clock.now += 11
    rules.allowed = {"jane": False}
    with pytest.raises(StatusError) as error:
        await rules.authorizer.check(JANE, LIST)
    assert (error.value.code, error.value.reason) == (403, "Forbidden")


async def test_the_spec_of_the_access_review() -> None:
    rules = Rules(jane=True)
    user = AuthenticatedUser("jane", "7", ("dev",), (("scopes", ("a", "b")),))
    await rules.authorizer.check(user, LIST)
    (spec,) = rules.proxied_request
    assert spec == {
        "user": "jane",
        "uid": "7",
        "groups": ["dev"],
        "extra": {"scopes": ["a", "b"]},
        "resourceAttributes": {
            "verb": "list",
            "group": "metrics.nvidia.com",
            "version": "v1alpha1",
            "resource": "podresources",
            "namespace": "team-a",
            "name": "",
        },
    }


@pytest.mark.parametrize(
    "other",
    [
        pytest.param((AuthenticatedUser("jane", groups=()), LIST), id="without-the-group"),
        pytest.param(
            (JANE, Attributes("watch", *("metrics.nvidia.com", "v1alpha1", "podresources", "team-a"))), id="verb"
        ),
        pytest.param(
            (JANE, Attributes("list", *("metrics.nvidia.com", "v1alpha1", "podresources", "team-b"))), id="namespace"
        ),
    ],
)
async def test_a_cached_review_applies_to_its_own_request_only(other: tuple[AuthenticatedUser, Attributes]) -> None:
    rules = Rules(jane=True)
    await rules.authorizer.check(JANE, LIST)
    rules.allowed = {}
    with pytest.raises(StatusError):
        await rules.authorizer.check(*other)


async def test_simultaneous_requests_share_one_review() -> None:
    rules = Rules(jane=True)
    await asyncio.gather(*(rules.authorizer.check(JANE, LIST) for _ in range(20)))
    assert len(rules.proxied_request) == 1


async def test_a_cancelled_request_does_not_cancel_the_review() -> None:
    rules = Rules(jane=True)
    first = asyncio.ensure_future(rules.authorizer.check(JANE, LIST))
    second = asyncio.ensure_future(rules.authorizer.check(JANE, LIST))
    await asyncio.sleep(0)
    first.cancel()
    await second
    assert len(rules.proxied_request) == 1


@pytest.mark.parametrize("broken", [OutcomeUnknown("no answer"), ApiRejected(403, "Forbidden", "we may not ask")])
async def test_a_failed_review_denies_access_and_is_not_cached(broken: Exception) -> None:
    rules = Rules(jane=True)
    rules.broken = broken
    with pytest.raises(StatusError) as error:
        await rules.authorizer.check(JANE, LIST)
    assert error.value.code == 503
    rules.broken = None
    await rules.authorizer.check(JANE, LIST)


async def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authorization, "MOST", 10)
    rules = Rules()
    for number in range(50):
        with pytest.raises(StatusError):
            await rules.authorizer.check(AuthenticatedUser(f"user-{number}"), LIST)
    assert len(rules.authorizer) == 10
