"""What an aggregated API asks of the API server: by name, and with the answer taken as it is meant."""

import base64
from contextlib import aclosing

import pytest

from gputile.kube.aggregation import Aggregation, Secret
from gputile.kube.api import ApiRejected, OutcomeUnknown, Snapshot
from tests.kube.server import fails, says
from tests.kube.test_client import serving

LIST = {"metadata": {"resourceVersion": "5"}}


async def test_one_config_map_is_followed() -> None:
    item = {"metadata": {"name": "extension-apiserver-authentication"}, "data": {"a": "b"}}
    async with (
        serving(says(200, LIST | {"items": [item]})) as (client, server),
        aclosing(Aggregation(client).follow_front_proxy()) as seen,
    ):
        first = await anext(seen)
    assert isinstance(first, Snapshot)
    assert first.items[0].data == {"a": "b"}
    assert server.asked[0].path == "/api/v1/namespaces/kube-system/configmaps"
    assert server.asked[0].query["fieldSelector"] == "metadata.name=extension-apiserver-authentication"


async def test_one_secret_is_followed() -> None:
    item = {"metadata": {"name": "s", "resourceVersion": "4"}, "data": {"tls.crt": "YWI=", "broken": "%%"}}
    async with (
        serving(says(200, LIST | {"items": [item]})) as (client, server),
        aclosing(Aggregation(client).follow_secret("ns", "s")) as seen,
    ):
        first = await anext(seen)
    assert isinstance(first, Snapshot)
    (found,) = first.items
    assert [found.get(key) for key in ("tls.crt", "broken", "absent")] == [b"ab", b"", b""]
    assert server.asked[0].query["fieldSelector"] == "metadata.name=s"


async def test_a_secret_is_written_only_over_what_was_read() -> None:
    written = {"metadata": {"name": "s", "resourceVersion": "5"}, "data": {"tls.crt": "YWI="}}
    async with serving(says(200, written), fails(409, "Conflict")) as (client, server):
        found = await Aggregation(client).write_secret("ns", "s", "4", {"tls.crt": b"ab"})
        assert (found.metadata.resource_version, found.get("tls.crt")) == ("5", b"ab")
        with pytest.raises(ApiRejected):
            await Aggregation(client).write_secret("ns", "s", "4", {})
    assert server.asked[0].line == "PATCH /api/v1/namespaces/ns/secrets/s"
    assert server.asked[0].body == {"metadata": {"resourceVersion": "4"}, "data": {"tls.crt": "YWI="}}


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        pytest.param({"caBundle": base64.b64encode(b"pem").decode()}, b"pem", id="one"),
        pytest.param({}, b"", id="none"),
        pytest.param({"caBundle": "%"}, b"", id="nonsense"),
    ],
)
async def test_whom_an_api_service_trusts(spec: dict[str, str], want: bytes) -> None:
    async with serving(says(200, {"spec": spec})) as (client, _):
        assert await Aggregation(client).ca_bundle("v1.a") == want


async def test_an_api_service_that_is_not_there() -> None:
    async with serving(fails(404, "NotFound"), fails(403, "Forbidden")) as (client, _):
        assert await Aggregation(client).ca_bundle("v1.a") is None
        with pytest.raises(ApiRejected):
            await Aggregation(client).ca_bundle("v1.a")


async def test_an_api_service_is_told_and_has_to_check_from_now_on() -> None:
    async with serving(says(200, {})) as (client, server):
        await Aggregation(client).set_ca_bundle("v1.a", b"pem")
    assert server.asked[0].line == "PATCH /apis/apiregistration.k8s.io/v1/apiservices/v1.a"
    assert server.asked[0].body == {"spec": {"caBundle": "cGVt", "insecureSkipTLSVerify": None}}


@pytest.mark.parametrize(
    ("status", "want"),
    [
        pytest.param({"allowed": True}, (True, ""), id="yes"),
        pytest.param({"allowed": False, "reason": "no rule"}, (False, "no rule"), id="no"),
        pytest.param({"allowed": False, "denied": True}, (False, ""), id="denied"),
        pytest.param({}, (False, ""), id="nothing-is-a-no"),
    ],
)
async def test_reviews(status: dict[str, object], want: tuple[bool, str]) -> None:
    async with serving(says(201, {"status": status})) as (client, server):
        assert await Aggregation(client).review({"user": "jane"}) == want
    assert server.asked[0].body["spec"] == {"user": "jane"}


async def test_an_answer_that_is_none_is_no_yes() -> None:
    async with serving(says(201, b"[]")) as (client, _):
        with pytest.raises(OutcomeUnknown):
            await Aggregation(client).review({})


def test_a_secret_without_data() -> None:
    assert Secret().get("tls.crt") == b""
