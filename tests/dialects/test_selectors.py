"""Annotations that select cards: ours in every dialect, HAMi's and NVIDIA's on nvidia.com/*."""

from typing import Any

import pytest

from gputile.dialects import registry
from gputile.dialects.selectors import merge
from gputile.model.refusals import RequestError
from gputile.model.requests import Constraints, Match, ModelRule, Strength
from gputile.testing.builders import pod
from tests.dialects.shortcuts import Rejected, constraints, expect, read

GPUTILE, HAMI = {"gputile.io/gpu": 1}, {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 1}
EVERY_DIALECT = [
    pytest.param(GPUTILE, id="gputile"),
    pytest.param({"aliyun.com/gpu-mem": 1}, id="gpushare"),
    pytest.param({"elasticgpu.io/gpu-core": 1}, id="nano"),
    pytest.param({"tencent.com/vcuda-core": 1}, id="vcuda"),
    pytest.param({"nvidia.com/gpu": 1}, id="nvidia"),
    pytest.param(HAMI, id="hami"),
    pytest.param({"nvidia.com/vgpu-number": 1}, id="vgpu"),
]


@pytest.mark.parametrize("limits", EVERY_DIALECT)
def test_our_keys_are_read_in_every_dialect(limits: dict[str, Any]) -> None:
    annotations = {
        "gputile.io/model": "A100, a30",
        "gputile.io/not-model": "80GB",
        "gputile.io/uuid": "GPU-a,GPU-b",
        "gputile.io/not-uuid": "GPU-b",
        "gputile.io/policy": "spread",
        "gputile.io/numa": "require",
        "gputile.io/links": "prefer",
    }
    assert constraints(pod(limits, annotations=annotations)) == Constraints(
        models=(ModelRule(("A100", "a30"), Match.NAME),),
        not_models=(ModelRule(("80GB",), Match.NAME),),
        uuids=frozenset({"GPU-a", "GPU-b"}),
        not_uuids=frozenset({"GPU-b"}),
        numa=Strength.REQUIRE,
        links=Strength.PREFER,
        node_policy="spread",
        card_policy="spread",
    )


@pytest.mark.parametrize("limits", EVERY_DIALECT)
def test_without_annotations_any_card_fits(limits: dict[str, Any]) -> None:
    assert constraints(pod(limits)) == Constraints()


@pytest.mark.parametrize("limits", EVERY_DIALECT)
def test_an_unknown_policy_is_refused_in_every_dialect(limits: dict[str, Any]) -> None:
    want = Rejected(
        RequestError.UNKNOWN_POLICY, "write one of binpack, fragmentation, random, spread, tiling, topology"
    )
    expect(pod(limits, annotations={"gputile.io/policy": "tetris"}), "", want)


@pytest.mark.parametrize(
    ("annotations", "want"),
    [
        pytest.param(
            {"nvidia.com/use-gputype": "a100,T4", "nvidia.com/nouse-gputype": "80GB"},
            Constraints(
                models=(ModelRule(("a100", "T4"), Match.SUBSTRING),),
                not_models=(ModelRule(("80GB",), Match.SUBSTRING),),
            ),
            id="types-are-substring-lists",
        ),
        pytest.param(
            {"nvidia.com/use-gputype": "", "nvidia.com/nouse-gputype": " , "},
            Constraints(),
            id="an-empty-value-is-no-constraint",
        ),
        pytest.param(
            {"nvidia.com/use-gpuuuid": "GPU-a", "nvidia.com/nouse-gpuuuid": "GPU-b"},
            Constraints(uuids=frozenset({"GPU-a"}), not_uuids=frozenset({"GPU-b"})),
            id="uuid-lists",
        ),
        pytest.param({"nvidia.com/numa-bind": "true"}, Constraints(numa=Strength.REQUIRE), id="numa-bind-requires"),
        pytest.param(
            {"nvidia.com/numa-bind": "T"}, Constraints(numa=Strength.REQUIRE), id="numa-bind-as-Go-reads-booleans"
        ),
        pytest.param(
            {"nvidia.com/numa-bind": True}, Constraints(numa=Strength.REQUIRE), id="numa-bind-as-a-yaml-boolean"
        ),
        pytest.param({"nvidia.com/numa-bind": "false"}, Constraints(), id="numa-bind-false"),
        pytest.param({"nvidia.com/numa-bind": False}, Constraints(), id="numa-bind-as-a-yaml-false"),
        pytest.param(
            {"nvidia.com/vgpu-mode": "hami-core,MPS"}, Constraints(modes=frozenset({"hami-core", "mps"})), id="modes"
        ),
        pytest.param({"hami.io/node-scheduler-policy": "spread"}, Constraints(node_policy="spread"), id="node-policy"),
        pytest.param(
            {"hami.io/gpu-scheduler-policy": "binpack"}, Constraints(card_policy="binpack"), id="card-binpack"
        ),
        pytest.param(
            {"hami.io/gpu-scheduler-policy": "topology-aware"}, Constraints(card_policy="topology"), id="topology-aware"
        ),
        pytest.param({"hami.io/gpu-scheduler-policy": "mutex"}, Constraints(idle=True), id="mutex-wants-idle-cards"),
        pytest.param(
            {"hami.io/gpu-scheduler-policy": "numa"}, Constraints(numa=Strength.PREFER), id="numa-is-a-preference"
        ),
        pytest.param(
            {"hami.io/gpu-scheduler-policy": "mutex, numa, Spread, binpack"},
            Constraints(idle=True, numa=Strength.PREFER, card_policy="spread"),
            id="in-a-chain-the-first-order-wins-and-filters-apply",
        ),
        pytest.param(
            {"hami.io/gpu-scheduler-policy": "numa", "nvidia.com/numa-bind": "true"},
            Constraints(numa=Strength.REQUIRE),
            id="numa-bind-is-stronger-than-a-preference",
        ),
    ],
)
def test_hamis_keys(annotations: dict[str, Any], want: Constraints) -> None:
    for limits in (HAMI, {"nvidia.com/gpu": 1}, {"nvidia.com/vcuda-core": 1}):
        assert constraints(pod(limits, annotations=annotations)) == want


@pytest.mark.parametrize(
    ("annotations", "want"),
    [
        pytest.param(
            {"hami.io/node-scheduler-policy": "random"},
            Rejected(RequestError.UNKNOWN_POLICY, "write one of binpack, spread"),
            id="hami-nodes-know-two-policies",
        ),
        pytest.param(
            {"hami.io/gpu-scheduler-policy": "mutex,tetris"},
            Rejected(
                RequestError.UNKNOWN_POLICY,
                "'tetris' is not a known policy; write one or more of binpack, mutex, numa, spread, topology-aware",
            ),
            id="the-unknown-policy-of-a-chain-is-named",
        ),
        pytest.param(
            {"nvidia.com/vgpu-mode": "fast"},
            Rejected(RequestError.BAD_ANNOTATION, "write one or more of hami-core, mig, mps"),
            id="an-unknown-mode",
        ),
        pytest.param(
            {"nvidia.com/numa-bind": "perhaps"},
            Rejected(RequestError.BAD_ANNOTATION, "true"),
            id="an-invalid-boolean",
        ),
        pytest.param(
            {"gputile.io/numa": "maybe"},
            Rejected(RequestError.BAD_ANNOTATION, "no, prefer, require"),
            id="an-unknown-strength",
        ),
    ],
)
def test_unknown_values_are_rejected_with_the_known_ones(annotations: dict[str, str], want: Rejected) -> None:
    expect(pod(HAMI, annotations=annotations), "hami", want)


def test_keys_of_one_family_mean_nothing_in_another() -> None:
    annotations = {"nvidia.com/use-gputype": "A100", "hami.io/gpu-scheduler-policy": "tetris"}
    assert constraints(pod(GPUTILE, annotations=annotations)) == Constraints()


A, B = ModelRule(("A",)), ModelRule(("B",))


@pytest.mark.parametrize(
    ("first", "second", "want"),
    [
        pytest.param(Constraints(), Constraints(), Constraints(), id="nothing-and-nothing"),
        pytest.param(
            Constraints(models=(A,), not_models=(A,)),
            Constraints(models=(B,), not_models=(B,)),
            Constraints(models=(A, B), not_models=(A, B)),
            id="both-model-lists-apply",
        ),
        pytest.param(
            Constraints(uuids=frozenset("ab"), not_uuids=frozenset("c"), modes=frozenset({"mps"})),
            Constraints(uuids=frozenset("bd"), not_uuids=frozenset("e")),
            Constraints(uuids=frozenset("b"), not_uuids=frozenset("ce"), modes=frozenset({"mps"})),
            id="uuid-lists-meet-and-exclusions-add-up",
        ),
        pytest.param(
            Constraints(node_policy="spread", card_policy="spread", numa=Strength.REQUIRE),
            Constraints(card_policy="binpack", links=Strength.PREFER, idle=True),
            Constraints(
                node_policy="spread", card_policy="binpack", numa=Strength.REQUIRE, links=Strength.PREFER, idle=True
            ),
            id="the-second-wins-only-where-it-has-a-value",
        ),
    ],
)
def test_merge(first: Constraints, second: Constraints, want: Constraints) -> None:
    assert merge(first, second) == want


def test_two_lists_without_a_common_card_accept_no_card() -> None:
    result = merge(Constraints(uuids=frozenset("a")), Constraints(uuids=frozenset("b")))
    assert not any(result.accepts_uuid(uuid) for uuid in "abc")


def test_an_unknown_annotation_of_ours_is_a_warning() -> None:
    manifest = pod(GPUTILE, annotations={"gputile.io/modle": "A100"})
    (warning,) = registry.notes(manifest, read(manifest))
    assert "did you mean `gputile.io/model`?" in warning
