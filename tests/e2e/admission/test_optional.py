"""deploy/admission-optional.yaml on a real API server: it adds the GPU to a container that requests only a share."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.api import Kube, Manifest
from tests.e2e.control_plane import ControlPlane
from tests.e2e.gputile import DEPLOY
from tests.e2e.pods import container, pod
from tests.e2e.processes import wait_until

KIND = "admissionregistration.k8s.io/v1/MutatingAdmissionPolicyBinding"
ODD = {f"example.com/r{n}": 1 for n in range(5_000)}
MEMORY_ONLY = {"gputile.io/memory": 900}


def limits(created: Manifest, which: str = "containers") -> dict[str, str]:
    amounts: dict[str, str] = created["spec"][which][0]["resources"].get("limits", {})
    return {name: amount for name, amount in amounts.items() if not name.startswith("example.com/")}


@pytest.fixture
def bringing(plane: ControlPlane, kube: Kube) -> Iterator[Kube]:
    kube.apply(DEPLOY / "admission-optional.yaml")

    def is_in_force() -> bool:
        created = kube.create(pod("sample", MEMORY_ONLY, schedulerName="nobody"))
        kube.delete("Pod", "sample", grace=0)
        return "gputile.io/gpu" in limits(created)

    wait_until(is_in_force, 20, "the policy in force")
    yield kube
    kube.delete(KIND, "gputile-bring-a-card")


@pytest.mark.parametrize(
    ("requested", "added"),
    [
        pytest.param(MEMORY_ONLY, {"gputile.io/gpu": "1"}, id="memory"),
        pytest.param({"gputile.io/cores": 20}, {"gputile.io/gpu": "1"}, id="cores"),
        pytest.param({"nvidia.com/gpumem": 20}, {"nvidia.com/gpu": "1"}, id="HAMi's memory"),
        pytest.param({"elasticgpu.io/gpu-memory": 2}, {"elasticgpu.io/gpu-core": "1"}, id="elastic-gpu's memory"),
        pytest.param({"gputile.io/memory": 9, "gputile.io/gpu": 2}, {}, id="a number of GPUs is kept"),
        pytest.param({"cpu": 1}, {}, id="no share, no GPU"),
        pytest.param({**ODD, **MEMORY_ONLY}, {"gputile.io/gpu": "1"}, id="memory beside 5,000 other resources"),
    ],
)
def test_a_share_without_a_gpu_gets_one(bringing: Kube, requested: dict[str, Any], added: dict[str, str]) -> None:
    created = bringing.create(pod("q", requested, schedulerName="nobody"))
    kept = {name: str(amount) for name, amount in requested.items() if name not in ODD}
    assert limits(created) == {**kept, **added}


def test_a_share_of_an_init_container_gets_a_gpu(bringing: Kube) -> None:
    created = bringing.create(pod("q", {}, initContainers=[container("first", MEMORY_ONLY)], schedulerName="nobody"))
    assert limits(created, "initContainers") == {"gputile.io/memory": "900", "gputile.io/gpu": "1"}


@pytest.mark.parametrize(("count", "adds"), [(64, True), (65, False), (1_300, False)])
def test_very_large_pods_are_not_changed(bringing: Kube, count: int, adds: bool) -> None:
    """Changing 1,300 containers took ten seconds."""
    many = [container(f"c{n}", MEMORY_ONLY) for n in range(count)]
    created = bringing.create(pod("q", {}, containers=many, schedulerName="nobody"))
    assert ("gputile.io/gpu" in limits(created)) is adds
