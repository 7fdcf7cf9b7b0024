"""Nodes as each family's agent describes them, and pods on them: plain JSON in the families' own formats."""

import json
from collections.abc import Mapping
from typing import Any

from gputile.audit.audit import audit
from gputile.audit.report import AuditReport

NOW = 1_800_000_000.0
THEN, JUST_NOW = "2027-01-15T07:00:00Z", "2027-01-15T07:59:30Z"  # an hour before, and half a minute
SIZE = 16000
Json = dict[str, Any]


def node(
    name: str,
    capacity: Mapping[str, Any],
    annotations: Mapping[str, str] = {},
    labels: Mapping[str, str] = {},
) -> Json:
    amounts = {key: str(value) for key, value in capacity.items()}
    metadata = {"name": name, "annotations": dict(annotations), "labels": dict(labels)}
    return {"kind": "Node", "metadata": metadata, "status": {"capacity": amounts, "allocatable": dict(amounts)}}


def hami(*gpus: str, name: str = "n", size: int = SIZE, **facts: Any) -> Json:
    listed = [
        {
            "id": uuid,
            "index": at,
            "count": 10,
            "devmem": size,
            "devcore": 100,
            "type": "NVIDIA",
            "health": True,
            **facts,
        }
        for at, uuid in enumerate(gpus)
    ]
    register = {"hami.io/node-nvidia-register": json.dumps(listed)}
    return node(name, {"nvidia.com/gpu": 10 * len(gpus)}, register)


def vgpu(*gpus: str, name: str = "n", domain: str = "nvidia.com", **config: Any) -> Json:
    listed = [
        {"id": at, "uuid": uuid, "core": 100, "memory": SIZE, "number": 10, "type": "T4", "healthy": True}
        for at, uuid in enumerate(gpus)
    ]
    annotations = {
        f"{domain}/node-device-register": json.dumps(listed),
        f"{domain}/node-config-info": json.dumps(config),
    }
    return node(name, {f"{domain}/vgpu-number": 10 * len(gpus)}, annotations)


def gpushare(per_gpu: int, gpus: int = 2, name: str = "n") -> Json:
    return node(name, {"aliyun.com/gpu-mem": per_gpu * gpus, "aliyun.com/gpu-count": gpus})


def elastic(gpus: int = 2, name: str = "n") -> Json:
    return node(name, {"elasticgpu.io/gpu-core": 100 * gpus, "elasticgpu.io/gpu-memory": SIZE * gpus})


def vcuda(gpus: int = 2, name: str = "n") -> Json:
    return node(name, {"tencent.com/vcuda-core": 100 * gpus, "tencent.com/vcuda-memory": 62 * gpus})


def stock(gpus: int = 2, name: str = "n", replicas: int = 1) -> Json:
    """The NVIDIA device plugin with GPU feature discovery."""
    labels = {"memory": SIZE, "count": gpus, "replicas": replicas}
    texts = {f"nvidia.com/gpu.{key}": str(value) for key, value in labels.items()}
    return node(name, {"nvidia.com/gpu": gpus * replicas}, labels=texts)


def ours(*gpus: str, name: str = "n", since: Any = None) -> Json:
    inventory: Json = {"version": 1, "cards": [{"index": at, "uuid": u, "memory": SIZE} for at, u in enumerate(gpus)]}
    if since is not None:
        inventory["since"] = since
    return node(name, {"gputile.io/gpu": 10 * len(gpus)}, {"gputile.io/inventory": json.dumps(inventory)})


def pod(
    *containers: Mapping[str, Any],
    on: str = "n",
    name: str = "p",
    init: tuple[Mapping[str, Any], ...] = (),
    labels: Mapping[str, str] = {},
    started: str | None = THEN,
    bound: str = THEN,
    notes: Mapping[str, Any] = {},
) -> Json:
    return {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "ml",
            "uid": f"uid-{name}",
            "annotations": dict(notes),
            "labels": dict(labels),
            "creationTimestamp": bound,
        },
        "spec": {
            "nodeName": on,
            "initContainers": [_container(f"i{n}", limits) for n, limits in enumerate(init)],
            "containers": [_container(f"c{n}", limits) for n, limits in enumerate(containers)],
        },
        "status": {"phase": "Running", **({"startTime": started} if started else {})},
    }


def _container(name: str, limits: Mapping[str, Any]) -> Json:
    rest = dict(limits)
    container: Json = {"name": rest.pop("name", name)}
    if rest.pop("sidecar", False):
        container["restartPolicy"] = "Always"
    return {**container, "resources": {"limits": {key: str(value) for key, value in rest.items()}}}


def look(*objects: Json, unit: str = "auto", now: float = NOW) -> AuditReport:
    nodes = [obj for obj in objects if obj["kind"] == "Node"]
    return audit(nodes, [obj for obj in objects if obj["kind"] == "Pod"], unit, now)


def held(report: AuditReport) -> dict[Any, tuple[int, int]]:
    """Memory and cores allocated of each held GPU: by UUID, or by index where the agent publishes no UUID."""
    return {
        gpu.index if "#" in gpu.uuid else gpu.uuid: (gpu.memory_allocated, gpu.cores_allocated)
        for gpu in report.gpus
        if gpu.holders
    }


def unplaced(report: AuditReport) -> list[tuple[int, int, int]]:
    """By pod: whole GPUs, shares, and the memory of these, on GPUs that are unknown."""
    return [(pod.gpus, pod.shares, pod.memory) for pod in report.unplaced]


def codes(report: AuditReport) -> list[str]:
    return [str(notice.code) for notice in report.findings]


def remarks(report: AuditReport) -> list[str]:
    return [str(notice.code) for notice in report.remarks]
