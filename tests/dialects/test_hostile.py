"""Untrusted pods and nodes: reading them stays cheap, and messages stay short."""

import difflib
import json
from difflib import get_close_matches
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputile.dialects import records, registry
from gputile.dialects.parsing import LARGEST_NODE, LONGEST_LIST, SHOWN, convert_pod, host_needs
from gputile.model.refusals import BadRequest, NodeReason, RequestError
from gputile.model.requests import PodRequest, phases
from gputile.testing.builders import pod
from tests.dialects.shortcuts import Manifest, Rejected, expect, node_of, object_of, raw_node, read

GPUTILE, NVIDIA = {"gputile.io/gpu": 1}, {"nvidia.com/gpu": 1}
HAMI, VGPU = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 1}, {"nvidia.com/vgpu-number": 1}


# ---- annotations that look like ours --------------------------------------------------------------------------------


def with_unknown_annotations(count: int) -> Manifest:
    return pod(GPUTILE, annotations={f"gputile.io/modle-{n}": "A100" for n in range(count)})


def test_reading_a_pod_never_looks_for_the_nearest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took four seconds for 17,000 annotations, at every watch event."""
    monkeypatch.setattr(difflib, "get_close_matches", lambda *_, **__: pytest.fail("difflib was compared"))
    assert isinstance(registry.read_pod(with_unknown_annotations(5)), PodRequest)


@pytest.mark.parametrize(
    ("count", "hints", "last"),
    [
        pytest.param(0, 0, "", id="none-needs-no-hint"),
        pytest.param(1, 1, "did you mean `gputile.io/model`?", id="one-gets-a-hint"),
        pytest.param(3, 3, "did you mean `gputile.io/model`?", id="three-get-hints"),
        pytest.param(5, 3, "2 more annotations under `gputile.io/` are unknown", id="of-five-two-are-only-counted"),
    ],
)
def test_hints_are_for_three_annotations_at_most(
    count: int, hints: int, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[str] = []

    def counted(name: str, *known: Any, **more: Any) -> list[str]:
        compared.append(name)
        return get_close_matches(name, *known, **more)

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    notes = registry.notes(with_unknown_annotations(count), read(with_unknown_annotations(count)))
    assert len(compared) == hints
    assert len(notes) == hints + (count > hints)
    assert not notes or last in notes[-1]


# ---- lists ----------------------------------------------------------------------------------------------------------

LISTS = [
    pytest.param(GPUTILE, "gputile.io/model", id="our-models"),
    pytest.param(GPUTILE, "gputile.io/not-model", id="our-models-that-are-excluded"),
    pytest.param(GPUTILE, "gputile.io/uuid", id="our-uuids"),
    pytest.param(GPUTILE, "gputile.io/not-uuid", id="our-uuids-that-are-excluded"),
    pytest.param(HAMI, "gputile.io/uuid", id="our-uuids-in-another-dialect"),
    pytest.param(NVIDIA, "nvidia.com/gpu.model", id="models-of-nvidia-gpu-scheduler"),
    pytest.param(HAMI, "nvidia.com/use-gputype", id="hamis-types"),
    pytest.param(HAMI, "nvidia.com/nouse-gputype", id="hamis-types-that-are-excluded"),
    pytest.param(HAMI, "nvidia.com/use-gpuuuid", id="hamis-uuids"),
    pytest.param(HAMI, "nvidia.com/nouse-gpuuuid", id="hamis-uuids-that-are-excluded"),
    pytest.param(VGPU, "nvidia.com/include-gpu-type", id="vgpu-managers-types"),
    pytest.param(VGPU, "nvidia.com/exclude-gpu-type", id="vgpu-managers-types-that-are-excluded"),
    pytest.param(VGPU, "nvidia.com/include-gpu-uuid", id="vgpu-managers-uuids"),
    pytest.param(VGPU, "nvidia.com/exclude-gpu-uuid", id="vgpu-managers-uuids-that-are-excluded"),
]


@pytest.mark.parametrize(("limits", "key"), LISTS)
def test_a_list_has_256_entries_at_most(limits: dict[str, Any], key: str) -> None:
    def listing(count: int) -> Manifest:
        return pod(limits, annotations={key: ",".join(f"GPU-{n}" for n in range(count))})

    assert isinstance(registry.read_pod(listing(LONGEST_LIST)), PodRequest)
    expect(
        listing(LONGEST_LIST + 1),
        "",
        Rejected(RequestError.BAD_ANNOTATION, f"`{key}`: it lists 257 entries; write at most 256"),
    )


@pytest.mark.parametrize(
    ("limits", "key"),
    [
        pytest.param(HAMI, "hami.io/gpu-scheduler-policy", id="policies"),
        pytest.param(HAMI, "nvidia.com/vgpu-mode", id="modes"),
        pytest.param(HAMI, "hami.io/device-scoring-weights", id="weights"),
    ],
)
def test_a_list_of_known_values_has_256_entries_at_most_too(limits: dict[str, Any], key: str) -> None:
    annotations = {key: ",".join(["binpack"] * 300)}
    expect(
        pod(limits, annotations=annotations),
        "",
        Rejected(RequestError.BAD_ANNOTATION, "lists 300 entries; write at most 256"),
    )


# ---- messages -------------------------------------------------------------------------------------------------------

LONG = "x" * 5000


def container(**changed: Any) -> Manifest:
    manifest = pod(GPUTILE)
    manifest["spec"]["containers"][0] |= changed
    return manifest


@pytest.mark.parametrize(
    "manifest",
    [
        pytest.param(pod({"gputile.io/gpu": LONG}), id="a-number"),
        pytest.param(pod({"gputile.io/gpu": "-" + "1" * 29}), id="a-negative-number"),
        pytest.param(pod({f"gputile.io/{LONG}": 1}), id="the-name-of-a-resource"),
        pytest.param(container(name=LONG, resources={"limits": {"gputile.io/gpu": "a"}}), id="the-name-of-a-container"),
        pytest.param(pod(GPUTILE, annotations={"gputile.io/policy": LONG}), id="a-policy"),
        pytest.param(pod(GPUTILE, annotations={"gputile.io/numa": LONG}), id="a-numa-strength"),
        pytest.param(pod({}, annotations={"nvidia.com/gpumem": LONG}), id="a-resource-among-annotations"),
        pytest.param(pod(HAMI, annotations={"hami.io/gpu-scheduler-policy": LONG}), id="hamis-policy"),
        pytest.param(pod(HAMI, annotations={"nvidia.com/vgpu-mode": LONG}), id="hamis-mode"),
        pytest.param(pod(HAMI, annotations={"nvidia.com/numa-bind": LONG}), id="hamis-flag"),
        pytest.param(pod(HAMI, annotations={"hami.io/device-scoring-weights": LONG}), id="hamis-weights"),
        pytest.param(pod(VGPU, annotations={"nvidia.com/device-topology-mode": LONG}), id="vgpu-managers-topology"),
        pytest.param(
            pod({"tencent.com/vcuda-core": 1}, annotations={"tencent.com/vcuda-core-limit": LONG}), id="vcudas-limit"
        ),
        pytest.param(pod({"aliyun.com/gpu-mem": 1}, labels={"aliyun.com/gpu-count": LONG}), id="gpushares-count"),
        pytest.param({"metadata": LONG}, id="no-pod-at-all"),
    ],
)
def test_a_message_repeats_little_of_what_was_written(manifest: Manifest) -> None:
    parsed = registry.read_pod(manifest)
    assert isinstance(parsed, BadRequest)
    assert "x" * (SHOWN + 1) not in parsed.message
    assert len(parsed.message) < 400


GRANT = {"version": 1, "pod": "uid-1", "node": "n1", "dialect": "gputile"}
TILE = {"uuid": "GPU-n1-0", "index": 0, "memory": 1, "cores": 1}


@pytest.mark.parametrize(
    ("limits", "annotations"),
    [
        pytest.param(GPUTILE, {"gputile.io/grant": json.dumps(GRANT | {"pod": LONG, "containers": []})}, id="a-uid"),
        pytest.param(
            GPUTILE,
            {"gputile.io/grant": json.dumps(GRANT | {"containers": [{"name": "a", "tiles": [], "role": LONG}]})},
            id="a-role-that-the-decoder-repeats",
        ),
    ],
)
def test_a_message_about_a_grant_repeats_little_of_it(limits: dict[str, Any], annotations: dict[str, str]) -> None:
    parsed_grant = records.read_grant(object_of(pod(limits, annotations=annotations, on="n1")), None)
    assert isinstance(parsed_grant, BadRequest)
    assert len(parsed_grant.message) < 400


@pytest.mark.parametrize("sign", ["\x1b[2J", "\x9b", "\r", "\u202e", "\x00"])
def test_a_message_has_no_control_characters(sign: str) -> None:
    parsed = registry.read_pod(container(name=f"a{sign}", resources={"limits": {"gputile.io/gpu": f"b{sign}"}}))
    assert isinstance(parsed, BadRequest)
    assert parsed.message.isprintable()


# ---- many containers ------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.integers(0, 4)), max_size=6),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=3),
)
def test_host_needs_follow_the_phases(inits: list[tuple[bool, int, int]], apps: list[tuple[int, int]]) -> None:
    """In one pass: thousands of sidecars before thousands of init containers took a second."""
    first = tuple({"cpu": cpu, "memory": f"{mem}Mi", "sidecar": sidecar} for sidecar, cpu, mem in inits)
    parsed_pod = object_of(pod(*({"cpu": cpu, "memory": f"{mem}Mi"} for cpu, mem in apps), init=first))
    alive = phases([role for role, _ in parsed_pod.containers()])
    needs = [*((cpu, mem) for _, cpu, mem in inits), *apps]
    sums = [
        tuple(sum(need[part] for need, mine in zip(needs, alive, strict=True) if phase in mine) for part in (0, 1))
        for phase in range(len(inits) + 1)
    ]
    assert host_needs(parsed_pod) == (1000 * max(cpu for cpu, _ in sums), max(mem for _, mem in sums))


# ---- nodes ----------------------------------------------------------------------------------------------------------


def ours(count: int) -> dict[str, str]:
    cards = [{"index": n, "uuid": f"u{n}", "memory": 1, "links": {"0": 1}} for n in range(count)]
    return {"gputile.io/inventory": json.dumps({"version": 1, "cards": cards})}


def hamis(count: int) -> dict[str, str]:
    return {"hami.io/node-nvidia-register": json.dumps([{"id": f"u{n}", "index": n} for n in range(count)])}


def old_hamis(count: int) -> dict[str, str]:
    return {"hami.io/node-nvidia-register": "".join(f"u{n},1,1,1,T4,0,true:" for n in range(count))}


def vgpus(count: int) -> dict[str, str]:
    return {"nvidia.com/node-device-register": json.dumps([{"id": n, "uuid": f"u{n}"} for n in range(count)])}


def forks(count: int) -> dict[str, str]:
    return {"tydic.io/nvidia-device-register": json.dumps([{"id": f"u{n}", "memory": 1} for n in range(count)])}


@pytest.mark.parametrize(
    "register",
    [
        pytest.param(ours, id="ours"),
        pytest.param(hamis, id="hamis"),
        pytest.param(old_hamis, id="hamis-older-one"),
        pytest.param(vgpus, id="vgpu-managers"),
        pytest.param(forks, id="that-of-vcudas-fork"),
    ],
)
def test_a_register_of_more_than_256_gpus_puts_the_node_out_of_use(register: Any) -> None:
    """A table of the links of 3,500 GPUs took 15 seconds."""
    assert len(node_of(raw_node(annotations=register(LARGEST_NODE))).cards) == LARGEST_NODE
    parsed_node = node_of(raw_node(annotations=register(LARGEST_NODE + 1)))
    assert (parsed_node.fault, parsed_node.cards) == (NodeReason.BAD_INVENTORY, ())


@pytest.mark.parametrize("weight", [-(2**31) - 1, 2**31, 10**30])
def test_a_link_that_no_array_can_hold_puts_the_node_out_of_use(weight: int) -> None:
    cards = [{"index": n, "uuid": f"u{n}", "memory": 1, "links": {"0": weight}} for n in range(2)]
    inventory = {"gputile.io/inventory": json.dumps({"version": 1, "cards": cards})}
    assert node_of(raw_node(annotations=inventory)).fault == NodeReason.BAD_INVENTORY


def test_deep_json_is_a_bad_annotation() -> None:
    deep = {"gputile.io/grant": '{"containers":' + "[" * 60_000}
    parsed_grant = records.read_grant(object_of(pod(GPUTILE, annotations=deep, on="n1")), None)
    assert isinstance(parsed_grant, BadRequest)
    assert node_of(raw_node(annotations={"gputile.io/inventory": "[" * 60_000})).fault == NodeReason.BAD_INVENTORY
    assert isinstance(convert_pod(json.loads("[" * 500 + "]" * 500)), BadRequest)
