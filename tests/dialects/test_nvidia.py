"""nvidia.com/gpu alone: whole cards, by model."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gputile.dialects import gputile, nvidia, records, registry
from gputile.dialects.settings import DEFAULTS
from gputile.model.cards import Card
from gputile.model.refusals import RequestError
from gputile.model.requests import Role
from gputile.testing.builders import ask, node, pod
from tests.dialects.shortcuts import (
    Manifest,
    Rejected,
    Want,
    assert_round_trip,
    bound,
    constraints,
    expect,
    grant_context,
    held,
    no_request,
    node_of,
    object_of,
    pods,
    raw_node,
    tile,
)

GPU = "nvidia.com/gpu"


@pytest.mark.parametrize(
    ("manifest", "want"),
    [
        pytest.param(pod({GPU: 1}), ask(whole=True, name="c0"), id="a-gpu-is-a-whole-card-of-its-own"),
        pytest.param(pod({GPU: "8"}), ask(whole=True, cards=8, name="c0"), id="eight-gpus-are-eight-whole-cards"),
        pytest.param(pod({GPU: 0}), None, id="zero-is-no-request"),
        pytest.param(
            pod({GPU: 1}, {}, {GPU: 2}),
            (ask(whole=True, name="c0"), no_request("c1"), ask(whole=True, cards=2, name="c2")),
            id="each-container-has-its-own-cards",
        ),
        pytest.param(
            pod({}, init=({GPU: 1},)),
            (ask(whole=True, name="init-0", role=Role.INIT), no_request("c0")),
            id="an-init-container-alone-is-a-request",
        ),
        pytest.param(
            pod({GPU: -1}), Rejected(RequestError.NEGATIVE, "write 0 or more"), id="a-negative-count-is-refused"
        ),
        pytest.param(
            pod({GPU: 0.5}),
            Rejected(RequestError.NOT_A_NUMBER, "write a whole number"),
            id="half-a-gpu-is-no-whole-number",
        ),
        pytest.param(pod({"nvidia.com/mig-1g.10gb": 1}), None, id="MIG-profiles-are-ignored"),
    ],
)
def test_whole_cards(manifest: Manifest, want: Want) -> None:
    expect(manifest, "nvidia", want)


MODEL, NEWER_MODEL = "nvidia.com/gpu.model", "nvidia-gpu-scheduler/gpu.model"
MODELS = ("Tesla T4", "Tesla V100-SXM2-32GB", "NVIDIA A10", "NVIDIA A100-SXM4-80GB", "NVIDIA A30")


@pytest.mark.parametrize(
    ("annotations", "accepted"),
    [
        pytest.param({MODEL: "Tesla V100-SXM2-32GB"}, {"Tesla V100-SXM2-32GB"}, id="the-full-name-of-v0.1"),
        pytest.param({NEWER_MODEL: "Tesla V100-SXM2-32GB"}, {"Tesla V100-SXM2-32GB"}, id="the-full-name-of-v0.2"),
        pytest.param({MODEL: "  tesla v100-sxm2-32gb "}, {"Tesla V100-SXM2-32GB"}, id="trimmed-and-without-case"),
        pytest.param({MODEL: "Tesla T4, a30"}, {"Tesla T4", "NVIDIA A30"}, id="a-list-of-which-one-must-match"),
        pytest.param({MODEL: "V100"}, {"Tesla V100-SXM2-32GB"}, id="a-part-of-the-name"),
        pytest.param({MODEL: "A10"}, {"NVIDIA A10"}, id="A10-is-not-A100"),
        pytest.param({MODEL: ""}, set(MODELS), id="an-empty-value-is-no-constraint"),
        pytest.param({}, set(MODELS), id="no-annotation-no-constraint"),
        pytest.param({MODEL: "Tesla", NEWER_MODEL: "T4"}, {"Tesla T4"}, id="both-keys-must-hold"),
        pytest.param(
            {"nvidia.com/use-gputype": "a10"}, {"NVIDIA A10", "NVIDIA A100-SXM4-80GB"}, id="hami's-key-is-a-substring"
        ),
        pytest.param(
            {"nvidia.com/nouse-gputype": "tesla,A30"},
            {"NVIDIA A10", "NVIDIA A100-SXM4-80GB"},
            id="hami's-nouse-key-is-honoured",
        ),
        pytest.param({"gputile.io/model": "A30"}, {"NVIDIA A30"}, id="our-own-key-is-honoured"),
    ],
)
def test_models(annotations: dict[str, str], accepted: set[str]) -> None:
    parsed_constraints = constraints(pod({GPU: 1}, annotations=annotations))
    assert {model for model in MODELS if parsed_constraints.accepts_model(model)} == accepted


def test_uuids_and_policies_of_hami_are_honoured() -> None:
    parsed_constraints = constraints(
        pod(
            {GPU: 1},
            annotations={
                "nvidia.com/use-gpuuuid": "GPU-a, GPU-b",
                "nvidia.com/nouse-gpuuuid": "GPU-c",
                "hami.io/node-scheduler-policy": "spread",
                "hami.io/gpu-scheduler-policy": "binpack",
            },
        )
    )
    assert (parsed_constraints.uuids, parsed_constraints.not_uuids) == (
        frozenset({"GPU-a", "GPU-b"}),
        frozenset({"GPU-c"}),
    )
    assert (parsed_constraints.node_policy, parsed_constraints.card_policy) == ("spread", "binpack")


# ---- grants ---------------------------------------------------------------------------------------------------------


def test_written_grant() -> None:
    context = grant_context(pod({GPU: 2}), node().cards(2).node(), held("c0", tile(0, 81920, 100), tile(1, 81920, 100)))
    written = nvidia.write_grant(context)
    assert (written.annotations, written.labels) == ({}, {})
    assert written.env == {"c0": {"NVIDIA_VISIBLE_DEVICES": "GPU-n1-0,GPU-n1-1"}}
    both = registry.write_grant(context)
    assert both.annotations == gputile.write_grant(context).annotations
    assert (both.labels, both.env) == ({}, written.env)


def test_the_original_leaves_no_record() -> None:
    manifest = pod({GPU: 1}, on="n1")
    assert nvidia.read_grant(object_of(manifest), node().cards(2).node().cards, DEFAULTS) is None
    assert records.read_grant(object_of(manifest), node().cards(2).node()) is None


def test_our_record_of_it_is_read_back() -> None:
    manifest = pod({GPU: 1})
    context = grant_context(manifest, node().cards(2).node(), held("c0", tile(1, 81920, 100)))
    assert records.read_grant(bound(manifest, registry.write_grant(context)), None) == context.grant


@settings(max_examples=25)
@given(pods(st.fixed_dictionaries({GPU: st.integers(1, 2)})))
def test_a_written_grant_is_read_back(manifest: Manifest) -> None:
    assert_round_trip(nvidia, manifest)


# ---- nodes ----------------------------------------------------------------------------------------------------------


def averages(count: int, memory: int, model: str = "", slots: int = 10) -> tuple[Card, ...]:
    return tuple(Card(index=n, uuid=f"n1#{n}", memory=memory, model=model, slots=slots) for n in range(count))


T4 = {"nvidia.com/gpu.product": "Tesla-T4", "nvidia.com/gpu.memory": "15360", "nvidia.com/gpu.count": "2"}


@pytest.mark.parametrize(
    ("capacity", "labels", "want"),
    [
        pytest.param({GPU: 2}, T4, averages(2, 15360, "Tesla T4"), id="GFD-labels-have-model-memory-and-count"),
        pytest.param({GPU: "2"}, {}, averages(2, 0), id="a-capacity-alone-shows-only-the-number"),
        pytest.param(
            {GPU: 8},
            T4 | {"nvidia.com/gpu.product": "Tesla-T4-SHARED", "nvidia.com/gpu.replicas": "4"},
            averages(2, 15360, "Tesla T4", slots=4),
            id="shared-cards-are-counted-once-with-a-slot-per-replica",
        ),
        pytest.param(
            {GPU: 8},
            {"nvidia.com/gpu.replicas": "4"},
            averages(2, 0, slots=4),
            id="without-a-count-label-the-capacity-is-divided-by-the-replicas",
        ),
        pytest.param({GPU: 0}, T4, (), id="no-capacity-no-cards"),
        pytest.param({}, T4, (), id="labels-without-a-plugin-are-no-cards"),
        pytest.param({GPU: 1}, {"nvidia.com/gpu.memory": "much"}, averages(1, 0), id="a-label-in-words-is-ignored"),
    ],
)
def test_read_node(capacity: dict[str, Any], labels: dict[str, str], want: tuple[Card, ...]) -> None:
    parsed_node = node_of(raw_node(capacity, labels=labels))
    assert (parsed_node.cards, parsed_node.fault) == (want, "")


@pytest.mark.parametrize(
    ("product", "wanted"),
    [
        pytest.param("Tesla-T4", "Tesla T4", id="blanks"),
        pytest.param("Tesla-V100-SXM2-32GB", "Tesla V100-SXM2-32GB", id="blanks-and-dashes-of-the-drivers-name"),
        pytest.param("NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-SXM4-80GB", id="as-the-label-spells-it"),
        pytest.param("NVIDIA-A100-SXM4-80GB", "A100-SXM4-80GB", id="a-part-with-a-dash"),
    ],
)
def test_the_drivers_model_name_matches_a_node_with_gfd_labels(product: str, wanted: str) -> None:
    """GFD writes blanks as dashes, so dashes and blanks are the same on such a node."""
    (card,) = node_of(raw_node({GPU: 1}, labels={"nvidia.com/gpu.product": product})).cards
    assert constraints(pod({GPU: 1}, annotations={MODEL: wanted})).accepts_model(card.model)
