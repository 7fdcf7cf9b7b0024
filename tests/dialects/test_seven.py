"""What each of the seven dialects answers, as recorded in `seven.json`: to restructure a dialect changes none of it.

After an intended change, `python -m tests.dialects.test_seven` writes the file again; read the difference.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gputile.dialects import gputile, records, registry
from gputile.dialects.kube_objects import GrantContext, Metadata, NodeObject
from gputile.dialects.settings import DialectSettings
from gputile.engine.placement.place import Placement, place
from gputile.model.cards import Card, Node, NodeView
from gputile.model.grants import ContainerGrant, Grant, Tile
from gputile.model.requests import PodRequest
from gputile.scheduler.extender.server import routes
from gputile.sim.manifests import load_file
from gputile.testing.builders import pod
from tests.dialects.shortcuts import AT, bound, object_of

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).parent / "seven.json"
SEVEN = ("gpushare", "gputile", "hami", "nano", "nvidia", "vcuda", "vgpu")
DIALECTS = {dialect.NAME: dialect for dialect in registry.DIALECTS}
SETTINGS = {
    "default": DialectSettings(),
    "other units": DialectSettings(
        gpushare_unit="MiB", nano_unit="MiB", vgpu_domain="example.com", hami_memory_factor=2, vgpu_memory_factor=3
    ),
}
MIXED = (
    Card(index=0, uuid="GPU-a", memory=4096, slots=3),
    Card(index=1, uuid="GPU-b", memory=2500, slots=10),
    Card(index=2, uuid="GPU-m", memory=4096, mode="mig"),
    Card(index=3, uuid="GPU-s", memory=9999, slots=1, healthy=False),
    Card(index=4, uuid="GPU-u", memory=0),
)
LARGE = "more slots than a message"  # takes a tenth of a second for each dialect
CARDS: dict[str, tuple[Card, ...]] = {
    "none": (),
    "mixed": MIXED,
    "eight large": tuple(Card(index=n, uuid=f"GPU-{n}", memory=81920) for n in range(8)),
    LARGE: (Card(index=0, uuid="GPU-0", memory=81920, slots=200_000),),
}
SHELF = Node(
    name="n1",
    cards=tuple(Card(index=n, uuid=f"GPU-{n}", memory=40960, model="NVIDIA A30") for n in range(8)),
    cpu=64_000,
    memory=524_288,
)
SERVE = [[name] for name in SEVEN] + [["nvidia", "hami"], ["hami", "nvidia", "gputile"], list(SEVEN), [*SEVEN[::-1]]]

MORE_PODS: list[list[dict[str, Any]]] = [
    [{"gputile.io/gpu": 2}],
    [{"gputile.io/gpu": 1, "gputile.io/memory": 1000, "gputile.io/cores": 10}, {}, {"gputile.io/gpu": 1}],
    [{"aliyun.com/gpu-mem": 4}, {"aliyun.com/gpu-mem": 2}],
    [{"nano-gpu.io/gpu-core": 20, "nano-gpu.io/gpu-memory": 4}],
    [{"nano-gpu/gpu-percent": 20}, {}],
    [{"elasticgpu.io/gpu-core": 200}],
    [{"tencent.com/vcuda-core": 30, "tencent.com/vcuda-memory": 4}],
    [{"nvidia.com/vcuda-core": 30, "nvidia.com/vcuda-memory": 400}, {"nvidia.com/vcuda-core": 100}],
    [{"nvidia.com/gpu": 2}],
    [{"nvidia.com/gpu": 1, "nvidia.com/gpumem": 0}],
    [{"nvidia.com/gpu": 2, "nvidia.com/gpumem": 3000, "nvidia.com/gpucores": 30, "nvidia.com/priority": 1}],
    [{"nvidia.com/gpu": 1}, {"nvidia.com/gpu": 1, "nvidia.com/gpumem-percentage": 50}],
    [{"nvidia.com/vgpu-number": 2, "nvidia.com/vgpu-memory": 3000, "nvidia.com/vgpu-cores": 30}],
    [{"example.com/vgpu-number": 1, "example.com/vgpu-core": 30}],
    [{"gputile.io/gpu": 1, "nvidia.com/gpu": 1}],
    [{"nvidia.com/gpumem": 1}],
]


def served(serve: list[str], cards: tuple[Card, ...], settings: DialectSettings) -> Iterable[list[Any]]:
    for resource in registry.device_resources(serve, cards, settings):
        devices = resource.devices
        digest = hashlib.sha256(json.dumps(devices).encode()).hexdigest()[:16]
        shown = [len(devices), *devices[:1], *devices[-1:], digest]
        yield [resource.resource, resource.dialect, resource.fault, shown]


def facts() -> dict[str, Any]:
    """What a dialect is, apart from pods."""
    return {
        name: {
            "guesses": registry.agent_guesses(name),
            "served": name in registry.names(),
            **{
                case: {
                    "resources": sorted(DIALECTS[name].resources(settings)),
                    "record keys": sorted(DIALECTS[name].record_keys(settings)),
                    "gpus": {
                        resource: [
                            records.requested_gpus(object_of(pod({resource: amount})), settings)
                            for amount in (0, 1, 7, 100, 150, "?")
                        ]
                        for resource in sorted(DIALECTS[name].resources(settings))
                    },
                }
                for case, settings in SETTINGS.items()
            },
        }
        for name in SEVEN
    }


def devices() -> dict[str, Any]:
    return {
        f"{'+'.join(serve)}, {case}, {kind}": [
            list(served(serve, cards, settings)),
            registry.status_resources(serve, cards, settings),
        ]
        for serve in SERVE
        for case, settings in SETTINGS.items()
        for kind, cards in CARDS.items()
        if len(serve) == 1 or kind != LARGE
    }


def pods() -> dict[str, Any]:
    """How pods are read, what is written on them, and what they hold: those of `examples/` and some more."""
    manifests = {
        f"{path.parent.name}/{path.name}": workload.pod
        for path in sorted((ROOT / "examples").glob("*/*.yaml"))
        for workload in load_file(path).workloads
    }
    manifests |= {json.dumps(containers): pod(*containers) for containers in MORE_PODS}
    return {
        f"{name}, {case}": walk(manifest, settings)
        for name, manifest in manifests.items()
        for case, settings in SETTINGS.items()
    }


def walk(manifest: dict[str, Any], settings: DialectSettings) -> Any:
    """A pod from its manifest to its grant; of each grant what it holds, by our grant and by the dialect's record."""
    manifest = manifest | {"metadata": {"annotations": {}, "labels": {}, **manifest["metadata"], "uid": "uid-1"}}
    request = registry.read_pod(manifest, settings)
    if not isinstance(request, PodRequest):
        return msgspec.to_builtins(request)
    answer = [request.dialect, request.slots, request.together, request.block, msgspec.to_builtins(request.asks)]
    placement = place(request, NodeView.empty(SHELF))
    if not isinstance(placement, Placement):
        return [*answer, "does not fit"]
    grant = placement.grant("uid-1", request)
    context = GrantContext(
        grant=grant, pod=object_of(manifest), asked=request, cards=SHELF.cards, at=AT, settings=settings
    )
    written = registry.write_grant(context)
    ours = records.read_grant(bound(manifest, written), SHELF, settings)
    record = msgspec.structs.replace(
        written, annotations={key: text for key, text in written.annotations.items() if key != "gputile.io/grant"}
    )
    theirs = records.read_grant(bound(manifest, record), SHELF, settings)
    held = [msgspec.to_builtins(each.uses()) if isinstance(each, Grant) else None for each in (grant, ours, theirs)]
    return [*answer, msgspec.to_builtins(written), held]


def foreign_grants() -> dict[str, Any]:
    """What a grant holds whose dialect is known, unknown or empty."""
    answer = {}
    for dialect in (*SEVEN, "a dialect of tomorrow", ""):
        tiles = (Tile("GPU-0", 0, 1000, 10), Tile("GPU-1", 1, 1000, 10))
        grant = Grant(pod="uid-1", node="n1", dialect=dialect, containers=(ContainerGrant("c0", tiles),))
        node = NodeObject(Metadata(name="n1", annotations={gputile.ORPHANED: gputile.write_orphaned_pods([grant])}))
        orphaned = registry.read_orphaned_pods(node, SHELF.cards)
        assert isinstance(orphaned, tuple)
        answer[dialect] = msgspec.to_builtins(orphaned[0].uses())
    return answer


ANSWERS: dict[str, Callable[[], Any]] = {
    "dialects": facts,
    "extender routes": routes,
    "devices": devices,
    "pods": pods,
    "grants": foreign_grants,
}


@pytest.mark.parametrize("part", ANSWERS)
def test_the_seven_dialects_answer_as_recorded(part: str) -> None:
    assert json.loads(json.dumps(ANSWERS[part]())) == json.loads(RECORDED.read_text())[part]


def written(answers: dict[str, Any]) -> str:
    """JSON with one line for each answer."""
    parts = (
        f"{json.dumps(part)}: {{\n"
        + ",\n".join(f"  {json.dumps(key)}: {json.dumps(answers[part][key])}" for key in answers[part])
        + "\n}"
        for part in answers
    )
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    RECORDED.write_text(written({part: answer() for part, answer in ANSWERS.items()}))
