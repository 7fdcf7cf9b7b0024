"""One function turns a pod into what it holds, for filter, bind, the watch, nominations, the CLI and the simulator.

Seen to fail: `Allocation(...)` built in `offline_ledger` again; `allocation_of` that ignores `node`, that takes 0 CPU
without a request, or without `started`.
"""

import ast
from pathlib import Path
from typing import Any

import msgspec
import pytest

import gputile
from gputile.dialects.allocations import allocation_of, allocation_of_deleted_pod
from gputile.dialects.kube_objects import Pod
from gputile.model.allocations import Allocation
from gputile.model.grants import ContainerGrant, Grant, Tile
from gputile.model.requests import PodRequest
from gputile.testing.builders import pod as manifest

SRC = Path(gputile.__file__).parent
GRANT = Grant(pod="uid-1", node="n1", dialect="gputile", containers=(ContainerGrant("c0", (Tile("a", 0, 8, 0),)),))
REQUEST = PodRequest(dialect="gputile", asks=(), cpu=1500, memory=64)
HELD = Allocation(pod="uid-1", node="n1", name="default/web-0", grant=GRANT, priority=7, started=60.0)


def pod(*, on: str | None = None) -> Pod:
    document: dict[str, Any] = manifest({"gputile.io/gpu": 1, "cpu": 2, "memory": "1Gi"}, on=on)
    document["metadata"]["creationTimestamp"] = "1970-01-01T00:01:00Z"
    document["spec"]["priority"] = 7
    return msgspec.convert(document, Pod)


@pytest.mark.parametrize(
    ("built", "want"),
    [
        pytest.param(
            allocation_of(pod(), REQUEST, GRANT),
            msgspec.structs.replace(HELD, cpu=1500, memory=64),
            id="a-parsed-request-has-cpu-and-memory",
        ),
        pytest.param(
            allocation_of(pod(), None, GRANT),
            msgspec.structs.replace(HELD, cpu=2000, memory=1024),
            id="without-a-request-cpu-and-memory-are-read-from-the-pod",
        ),
        pytest.param(
            allocation_of(pod(on="n2"), None, GRANT, "n2"),
            msgspec.structs.replace(HELD, cpu=2000, memory=1024, node="n2"),
            id="a-grant-for-another-node-is-held-where-the-pod-runs",
        ),
        pytest.param(
            allocation_of(pod(on="n2"), None, None),
            msgspec.structs.replace(HELD, cpu=2000, memory=1024, node="n2", grant=None),
            id="without-a-grant-the-pod-holds-cpu-of-its-own-node",
        ),
        pytest.param(
            allocation_of_deleted_pod(GRANT),
            Allocation(pod="uid-1", node="n1", name="(deleted)/uid-1", grant=GRANT),
            id="of-a-deleted-pod-only-the-grant-is-known",
        ),
    ],
)
def test_what_a_pod_holds(built: Allocation, want: Allocation) -> None:
    assert built == want


def test_allocations_are_built_in_one_module() -> None:
    assert [path for path in sorted(SRC.rglob("*.py")) if _builds_allocations(path)] == [
        SRC / "dialects/allocations.py"
    ]


def _builds_allocations(path: Path) -> bool:
    code = path.read_text()
    if "Allocation(" not in code:  # to parse all modules takes a second
        return False
    calls = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call))
    return any(isinstance(call.func, ast.Name) and call.func.id == "Allocation" for call in calls)
