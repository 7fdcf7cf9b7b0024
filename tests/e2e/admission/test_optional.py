"""deploy/admission-optional.yaml on a real API server: who forgot the GPU beside its share gets one."""

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
FORGETFUL = {"gputile.io/memory": 900}


def limits(made: Manifest, which: str = "containers") -> dict[str, str]:
    found: dict[str, str] = made["spec"][which][0]["resources"].get("limits", {})
    return {name: amount for name, amount in found.items() if not name.startswith("example.com/")}


@pytest.fixture
def bringing(plane: ControlPlane, kube: Kube) -> Iterator[Kube]:
    kube.apply(DEPLOY / "admission-optional.yaml")

    def brings() -> bool:
        made = kube.create(pod("sample", FORGETFUL, schedulerName="nobody"))
        kube.delete("Pod", "sample", grace=0)
        return "gputile.io/gpu" in limits(made)

    wait_until(brings, 20, "the policy in force")
    yield kube
    kube.delete(KIND, "gputile-bring-a-card")


@pytest.mark.parametrize(
    ("asked", "got"),
    [
        pytest.param(FORGETFUL, {"gputile.io/gpu": "1"}, id="memory"),
        pytest.param({"gputile.io/cores": 20}, {"gputile.io/gpu": "1"}, id="cores"),
        pytest.param({"nvidia.com/gpumem": 20}, {"nvidia.com/gpu": "1"}, id="HAMi's memory"),
        pytest.param({"elasticgpu.io/gpu-memory": 2}, {"elasticgpu.io/gpu-core": "1"}, id="elastic-gpu's memory"),
        pytest.param({"gputile.io/memory": 9, "gputile.io/gpu": 2}, {}, id="one that says how many GPUs"),
        pytest.param({"cpu": 1}, {}, id="one that asks for no share"),
        pytest.param({**ODD, **FORGETFUL}, {"gputile.io/gpu": "1"}, id="one that asks for 5,000 other things, too"),
    ],
)
def test_a_share_brings_its_gpu(bringing: Kube, asked: dict[str, Any], got: dict[str, str]) -> None:
    made = bringing.create(pod("q", asked, schedulerName="nobody"))
    said = {name: str(amount) for name, amount in asked.items() if name not in ODD}
    assert limits(made) == {**said, **got}


def test_an_init_container_counts(bringing: Kube) -> None:
    made = bringing.create(pod("q", {}, initContainers=[container("first", FORGETFUL)], schedulerName="nobody"))
    assert limits(made, "initContainers") == {"gputile.io/memory": "900", "gputile.io/gpu": "1"}


@pytest.mark.parametrize(("count", "brings"), [(64, True), (65, False), (1_300, False)])
def test_very_large_pods_are_left_alone(bringing: Kube, count: int, brings: bool) -> None:
    """To mend 1,300 containers took ten seconds."""
    many = [container(f"c{n}", FORGETFUL) for n in range(count)]
    made = bringing.create(pod("q", {}, containers=many, schedulerName="nobody"))
    assert ("gputile.io/gpu" in limits(made)) is brings
