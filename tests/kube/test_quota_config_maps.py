"""Quotas from a ConfigMap: valid YAML, and mistakes that YAML itself would accept."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest
import yaml

from gputile.kube.api import KubeEvent, Snapshot, WatchFailed, WatchUpdate
from gputile.kube.client import Client
from gputile.kube.quota_config_maps import QuotaConfigMap, QuotaConfigMapMetadata, read_quotas
from gputile.model.errors import InputError
from gputile.quota.limits import Limit, Quota
from tests.kube.server import fails, listing, responds
from tests.kube.test_client import serving

TITLE = "ConfigMap kube-system/gputile-quota"
GOOD = """
namespaces:
  team-a: # researchers
    limits:
      - {model: A100, cards: 4}
    pools: [training]
"""


def test_yaml_is_read() -> None:
    want = {"team-a": Quota((Limit(model="A100", cards=400),), ("training",), TITLE)}
    assert read_quotas(GOOD, "quota.yaml", TITLE) == want


def test_the_example_is_valid() -> None:
    example = yaml.safe_load((Path(__file__).parents[2] / "examples" / "quota.yaml").read_text())
    config_map = msgspec.convert(example, QuotaConfigMap)
    assert (config_map.title, list(example["data"])) == (TITLE, ["quota.yaml"])
    quotas = read_quotas(config_map.text("quota.yaml"), "quota.yaml", TITLE)
    assert list(quotas) == ["team-a", "team-b", "visitors", "*"]
    assert quotas["visitors"].limits == ()


def test_the_old_key_is_json() -> None:
    want = {"a": Quota((Limit(model="T4", cards=100),), (), TITLE)}
    assert read_quotas('{"a": {"quota": {"T4": 1}}}', "gpu_quota", TITLE) == want


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param(None, "the key `quota.yaml` is missing; add it, or delete the ConfigMap to remove all quotas",
                     id="no-key"),
        pytest.param("", "`quota.yaml` is empty", id="emptied"),
        pytest.param("namespaces: {a: {limits: [}", "is invalid YAML", id="a-bracket-too-few"),
        pytest.param("namespaces:\n  a: {}\n  a: {limits: []}", "duplicate key `a` (line 3)",
                     id="twice"),
        pytest.param("namespaces: {a: {limits: [{cards: 1, cards: 2}]}}", "duplicate key `cards`",
                     id="twice-inside"),
        pytest.param("namespaces: {a: &x {}, b: *x}", "alias `*x` is not allowed here; write its value", id="an-alias"),
        pytest.param("!!python/object:os.system {}", "is invalid YAML", id="a-tag"),
        pytest.param("a: 1\n---\nb: 2", "is invalid YAML", id="two-documents"),
        pytest.param("\x00", "is invalid YAML", id="a-control-character"),
        pytest.param("[" * 1_000_000, "it is nested deeper than 10 levels", id="very-deep"),
        pytest.param("- " * 100_000, "it is nested deeper than 10 levels", id="very-deep-in-lines"),
        pytest.param("cards: !!int ''", "is invalid YAML", id="no-number"),
        pytest.param("cards: !!bool x", "is invalid YAML", id="no-truth"),
        pytest.param("2026-13-45: {}", "the field `2026-13-45` does not exist", id="a-day-is-text"),
    ],
)  # fmt: skip
def test_an_invalid_text_is_rejected_with_a_reason(text: str | None, words: str) -> None:
    with pytest.raises(InputError) as caught:
        read_quotas(text, "quota.yaml", TITLE)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_config_map_has_its_texts_and_the_last_valid_one() -> None:
    meta = QuotaConfigMapMetadata("q", "ns", "u", {"gputile.io/last-good-quota": "namespaces: {}"})
    config_map = QuotaConfigMap(meta, {"quota.yaml": GOOD})
    assert (config_map.title, config_map.text("quota.yaml"), config_map.text("other")) == ("ConfigMap ns/q", GOOD, None)
    assert config_map.last_good == "namespaces: {}"
    assert (QuotaConfigMap().text("x"), QuotaConfigMap().last_good) == (None, None)


# ---- at the API server ----------------------------------------------------------------------------------------------


def following(client: Client) -> AsyncGenerator[WatchUpdate[QuotaConfigMap], None]:
    return client.follow_config_map("ns", "q")


async def test_one_config_map_is_watched_by_its_name() -> None:
    item = {"metadata": {"name": "q", "namespace": "ns", "uid": "u"}, "data": {"quota.yaml": "x"}}
    async with serving(responds(200, listing(item))) as (client, server), aclosing(following(client)) as seen:
        first = await anext(seen)
    assert isinstance(first, Snapshot)
    assert first.items == (QuotaConfigMap(QuotaConfigMapMetadata("q", "ns", "u"), {"quota.yaml": "x"}),)
    assert server.requests[0].line == "GET /api/v1/namespaces/ns/configmaps"
    assert server.requests[0].query["fieldSelector"] == "metadata.name=q", (
        "so that RBAC can be limited to this ConfigMap"
    )


async def test_a_missing_right_to_watch_is_reported() -> None:
    async with serving(fails(403, "Forbidden")) as (client, _), aclosing(following(client)) as seen:
        first = await anext(seen)
    assert isinstance(first, WatchFailed)
    assert first.forbidden


async def test_a_config_map_is_annotated() -> None:
    async with serving(responds(200, {})) as (client, server):
        await client.annotate_config_map("ns", "q", "u", {"a": "b"})
    assert server.requests[0].line == "PATCH /api/v1/namespaces/ns/configmaps/q"
    assert server.requests[0].body == {"metadata": {"uid": "u", "annotations": {"a": "b"}}}


async def test_an_event_may_be_about_a_config_map() -> None:
    async with serving(responds(201, {})) as (client, server):
        await client.note(KubeEvent(namespace="ns", pod="q", uid="u", reason="R", message="m", about="ConfigMap"))
    assert server.requests[0].body["involvedObject"]["kind"] == "ConfigMap"
