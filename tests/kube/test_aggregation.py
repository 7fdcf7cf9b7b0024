"""The requests of an aggregated API to the API server: by name, and how responses are read."""

import base64
from contextlib import aclosing

import pytest

from gputile.kube.aggregation import Aggregation, Secret
from gputile.kube.api import ApiRejected, OutcomeUnknown, Snapshot
from tests.kube.server import fails, responds
from tests.kube.test_client import serving

LIST = {"metadata": {"resourceVersion": "5"}}


async def test_one_config_map_is_watched() -> None:
    item = {"metadata": {"name": "extension-apiserver-authentication"}, "data": {"a": "b"}}
    async with (
        serving(responds(200, LIST | {"items": [item]})) as (client, server),
        aclosing(Aggregation(client).follow_front_proxy()) as seen,
    ):
        first = await anext(seen)
    assert isinstance(first, Snapshot)
    assert first.items[0].data == {"a": "b"}
    assert server.requests[0].path == "/api/v1/namespaces/kube-system/configmaps"
    assert server.requests[0].query["fieldSelector"] == "metadata.name=extension-apiserver-authentication"


async def test_one_secret_is_watched() -> None:
    item = {"metadata": {"name": "s", "resourceVersion": "4"}, "data": {"tls.crt": "YWI=", "broken": "%%"}}
    async with (
        serving(responds(200, LIST | {"items": [item]})) as (client, server),
        aclosing(Aggregation(client).follow_secret("ns", "s")) as seen,
    ):
        first = await anext(seen)
    assert isinstance(first, Snapshot)
    (secret,) = first.items
    assert [secret.get(key) for key in ("tls.crt", "broken", "absent")] == [b"ab", b"", b""]
    assert server.requests[0].query["fieldSelector"] == "metadata.name=s"


async def test_a_secret_is_written_only_over_the_version_that_was_read() -> None:
    written = {"metadata": {"name": "s", "resourceVersion": "5"}, "data": {"tls.crt": "YWI="}}
    async with serving(responds(200, written), fails(409, "Conflict")) as (client, server):
        secret = await Aggregation(client).write_secret("ns", "s", "4", {"tls.crt": b"ab"})
        assert (secret.metadata.resource_version, secret.get("tls.crt")) == ("5", b"ab")
        with pytest.raises(ApiRejected):
            await Aggregation(client).write_secret("ns", "s", "4", {})
    assert server.requests[0].line == "PATCH /api/v1/namespaces/ns/secrets/s"
    assert server.requests[0].body == {"metadata": {"resourceVersion": "4"}, "data": {"tls.crt": "YWI="}}


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        pytest.param({"caBundle": base64.b64encode(b"pem").decode()}, b"pem", id="a-bundle"),
        pytest.param({}, b"", id="none"),
        pytest.param({"caBundle": "%"}, b"", id="not-base64"),
    ],
)
async def test_the_ca_bundle_of_an_api_service(spec: dict[str, str], want: bytes) -> None:
    async with serving(responds(200, {"spec": spec})) as (client, _):
        assert await Aggregation(client).ca_bundle("v1.a") == want


async def test_a_missing_api_service() -> None:
    async with serving(fails(404, "NotFound"), fails(403, "Forbidden")) as (client, _):
        assert await Aggregation(client).ca_bundle("v1.a") is None
        with pytest.raises(ApiRejected):
            await Aggregation(client).ca_bundle("v1.a")


async def test_setting_the_ca_bundle_ends_insecure_skip_tls_verify() -> None:
    async with serving(responds(200, {})) as (client, server):
        await Aggregation(client).set_ca_bundle("v1.a", b"pem")
    assert server.requests[0].line == "PATCH /apis/apiregistration.k8s.io/v1/apiservices/v1.a"
    assert server.requests[0].body == {"spec": {"caBundle": "cGVt", "insecureSkipTLSVerify": None}}


@pytest.mark.parametrize(
    ("status", "want"),
    [
        pytest.param({"allowed": True}, (True, ""), id="allowed"),
        pytest.param({"allowed": False, "reason": "no rule"}, (False, "no rule"), id="not-allowed"),
        pytest.param({"allowed": False, "denied": True}, (False, ""), id="denied"),
        pytest.param({}, (False, ""), id="an-empty-status-is-not-allowed"),
    ],
)
async def test_reviews(status: dict[str, object], want: tuple[bool, str]) -> None:
    async with serving(responds(201, {"status": status})) as (client, server):
        assert await Aggregation(client).review({"user": "jane"}) == want
    assert server.requests[0].body["spec"] == {"user": "jane"}


async def test_an_undecodable_review_allows_nothing() -> None:
    async with serving(responds(201, b"[]")) as (client, _):
        with pytest.raises(OutcomeUnknown):
            await Aggregation(client).review({})


def test_a_secret_without_data() -> None:
    assert Secret().get("tls.crt") == b""
