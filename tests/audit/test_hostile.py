"""Objects that were built to break the audit: each is a finding or counts as it is, and affects no other object."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputile.audit.advice import finding_lines
from gputile.audit.audit import audit
from tests.audit.nodes import (
    NOW,
    Json,
    codes,
    gpushare,
    hami,
    held,
    look,
    node,
    ours,
    pod,
    stock,
    unplaced,
)
from tests.audit.test_records import ALLOCATION, INDEX, ONE, OUR_TILE, TILE, grant, hami_record, vgpu_record
from tests.effort import examples

GOOD = pod(TILE, notes=hami_record(ONE), name="good")
DEEP = "[" * 100_000 + "]" * 100_000
GIANT = "9" * 200_000
MANY = 1300


def spec(**changes: Any) -> Json:
    manifest = pod(TILE, name="bad")
    return {**manifest, "spec": {**manifest["spec"], **changes}}


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(None, id="null"),
        pytest.param("pod", id="a text"),
        pytest.param([], id="a list"),
        pytest.param({}, id="an empty object"),
        pytest.param({"metadata": [], "spec": []}, id="lists where objects should be"),
        pytest.param(spec(nodeName={"n": 1}), id="a node that is an object"),
        pytest.param(spec(containers="none"), id="containers that are a text"),
        pytest.param(spec(containers=[None, 3]), id="containers that are not objects"),
        pytest.param(spec(containers=[{"name": ["c0"]}]), id="a container whose name is a list"),
    ],
)
def test_an_invalid_pod_is_a_finding_and_the_next_pod_counts(bad: Any) -> None:
    report = audit([hami("g0")], [bad, GOOD], now=NOW)
    assert codes(report) == ["unreadable-pod"]
    assert held(report) == {"g0": (6000, 10)}


@pytest.mark.parametrize(
    "annotations",
    [
        pytest.param({"gputile.io/grant": DEEP}, id="a grant of deep JSON"),
        pytest.param({"gputile.io/grant": GIANT}, id="a grant that is a giant number"),
        pytest.param(grant(("g0", 10**400, 0)), id="a tile of a giant number"),
        pytest.param(grant(containers=[{"name": "c0", "tiles": [], "role": ["app"]}]), id="a role that is a list"),
        pytest.param(grant(at=-1, version=10**30), id="a version of thirty digits"),
        pytest.param(grant(containers=[{"name": f"x{n}", "tiles": []} for n in range(5000)]), id="5000 containers"),
        pytest.param({ALLOCATION: DEEP, INDEX: GIANT}, id="a gpushare record of deep JSON and giant numbers"),
        pytest.param({ALLOCATION: json.dumps({"0": {"0": 10**300}})}, id="a gpushare amount of 300 digits"),
        pytest.param({ALLOCATION: json.dumps({str(n): {"0": 1} for n in range(45_000)})}, id="45,000 containers"),
        pytest.param({INDEX: ",".join(map(str, range(45_000)))}, id="45,000 indices"),
        pytest.param(hami_record("g0,NVIDIA,1,0:" * 45_000 + ";"), id="45,000 devices of HAMi"),
        pytest.param(hami_record(";" * 200_000), id="200,000 entries of HAMi"),
        pytest.param(hami_record(f"g0,NVIDIA,{GIANT},{GIANT}:;"), id="giant numbers of HAMi"),
        pytest.param(vgpu_record("c0[" + "0_g0_0_1," * 45_000 + "]"), id="45,000 devices of vgpu-manager"),
        pytest.param({f"d{n}/pre-allocated": "c0[0_x_0_1]" for n in range(9000)}, id="9000 domains"),
        pytest.param({f"tencent.com/predicate-gpu-idx-{n}": "0" for n in range(9000)}, id="9000 indices of vcuda"),
        pytest.param({f"gputile.io/key-{n}": "x" for n in range(17_000)}, id="17,000 keys that look like ours"),
        pytest.param(
            {"elasticgpu.io/assumed": "true", "elasticgpu.io/container-c0": "0," * 45_000}, id="nano's 45,000"
        ),
        pytest.param({"hami.io/vgpu-devices-allocated": ["g0"], "gputile.io/grant": {"a": 1}}, id="lists as values"),
    ],
)
@pytest.mark.parametrize("node_manifest", [hami("g0"), gpushare(15), ours("g0")], ids=["hami", "gpushare", "gputile"])
def test_annotations_of_any_size_and_kind_never_affect_another_pod(annotations: Json, node_manifest: Json) -> None:
    good = pod({"gputile.io/gpu": 1}, name="good", notes=grant(("g0", 6000, 10), pod="uid-good"))
    report = look(node_manifest, pod(TILE, name="bad", notes=annotations), good)
    assert "ml/good" in {holder.pod for gpu in report.gpus for holder in gpu.holders} | {u.pod for u in report.unplaced}
    assert all(len(line) < 2000 for line in finding_lines(report.findings))


@pytest.mark.parametrize(
    ("limits", "counted"),
    [
        pytest.param({"nvidia.com/gpu": GIANT}, 1, id="a number of 200,000 digits"),
        pytest.param({"nvidia.com/gpu": 10**18}, 2**31 - 1, id="more GPUs than atoms"),
        pytest.param({"nvidia.com/gpu": "-3"}, 1, id="fewer than none"),
        pytest.param({"nvidia.com/gpu": "0.5"}, 1, id="half a GPU"),
        pytest.param({"nvidia.com/gpu": [1]}, 1, id="a list"),
        pytest.param({"nvidia.com/gpu": "1e99"}, 2**31 - 1, id="an exponent"),
    ],
)
def test_invalid_numbers_count_as_one_gpu_and_giant_numbers_as_many(limits: Json, counted: int) -> None:
    manifest = pod({}, name="bad")
    manifest["spec"]["containers"][0]["resources"]["limits"] = limits
    report = look(hami("g0"), manifest)
    assert unplaced(report) == [(counted, 0, 0)]


def test_many_containers_are_counted_by_their_record() -> None:
    """1300 containers that each request a GPU, for which a recursive search exceeds the stack."""
    entries = "".join("g0,NVIDIA,10,0:;" for _ in range(MANY))
    tile = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 10}
    many = pod(*[tile] * 2, init=(tile,) * (MANY - 2), notes=hami_record(entries), name="many")
    report = look(hami("g0"), many)
    assert held(report) == {"g0": (20, 0)}


@pytest.mark.parametrize("role", ["init", "sidecar"])
def test_many_containers_without_a_record_are_counted_by_number(role: str) -> None:
    limits = {"nvidia.com/gpu": 1, **({"sidecar": True} if role == "sidecar" else {})}
    report = look(stock(8), pod({"nvidia.com/gpu": 1}, init=(limits,) * MANY))
    assert unplaced(report) == [(1 if role == "init" else MANY + 1, 0, 0)]


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param({"gputile.io/inventory": DEEP}, id="deep JSON"),
        pytest.param({"gputile.io/inventory": GIANT}, id="a giant number"),
        pytest.param({"gputile.io/inventory": '{"version": 1, "cards": {"a": 1}}'}, id="cards that are not a list"),
        pytest.param(
            {"gputile.io/inventory": '{"cards": [{"index": 0, "uuid": ["x"], "memory": 1}]}'}, id="a list as UUID"
        ),
        pytest.param(
            {"gputile.io/inventory": '{"cards": [{"index": -1, "uuid": "x", "memory": 1}]}'}, id="an index of -1"
        ),
        pytest.param({"hami.io/node-nvidia-register": "a,b,c:" * 9000}, id="a text that is not a register"),
        pytest.param({"hami.io/node-nvidia-register": "[" + "1," * 45_000 + "1]"}, id="a list of numbers"),
        pytest.param({"x/node-device-register": "{}"}, id="an object where a list should be"),
        pytest.param({"tydic.io/nvidia-device-register": '[{"id": "x"}]'}, id="a GPU without memory"),
    ],
)
def test_an_unreadable_node_is_a_finding_and_the_next_node_counts(bad: dict[str, str]) -> None:
    report = look(node("bad", {}, bad), hami("g0"), GOOD)
    assert codes(report) == ["unreadable-node"]
    assert held(report) == {"g0": (6000, 10)}


def test_a_node_of_very_many_gpus_is_read() -> None:
    many = [{"index": n, "uuid": f"g{n}", "memory": 1} for n in range(45_000)]
    report = look(node("n", {}, {"gputile.io/inventory": json.dumps({"version": 1, "cards": many})}))
    assert report.cards == 45_000


def test_control_characters_are_not_shown() -> None:
    bell = "\x1b]0;owned\x07\u202e"
    granted = pod(OUR_TILE, notes=grant((bell, 1, 0), pod="uid-bad", node="n"), name="bad")
    copied = pod(OUR_TILE, notes=grant((bell, 1, 0), pod=bell, node=bell), name="copied")
    foreign = pod(TILE, notes=hami_record(f"{bell},NVIDIA,1,1:;", on=bell), name="foreign")
    lines = "".join(finding_lines(look(ours("g0"), hami("h0", name="m"), granted, copied, foreign).findings))
    assert "\x1b" not in lines
    assert "\u202e" not in lines


KEYS = (
    *("metadata", "spec", "status", "annotations", "labels", "containers", "initContainers", "resources", "limits"),
    *("name", "nodeName", "uid", "capacity", "conditions", "nvidia.com/gpu", "aliyun.com/gpu-mem", INDEX, ALLOCATION),
    *("gputile.io/grant", "gputile.io/inventory", "hami.io/vgpu-devices-allocated", "hami.io/node-nvidia-register"),
)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from(["n", "g0", "0", "1,2"])
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=30,
)


@examples(300)
@given(JSON, JSON)
def test_any_json_is_answered(some_node: Any, some_pod: Any) -> None:
    report = audit([some_node, hami("g0")], [some_pod, GOOD], now=NOW)
    assert held(report).get("g0", (0, 0))[0] >= 6000
    list(finding_lines((*report.findings, *report.remarks)))
