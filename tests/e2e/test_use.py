"""What a real container's process uses of its card, from the driver to the Lease, both /metrics and the metrics API."""

from collections.abc import Iterator
from copy import deepcopy

import pytest

from gputile.dialects.usage_annotation import ReportedUsage, read_usage
from gputile.model.usage import CardUsage
from tests.e2e import agents
from tests.e2e.agents import NodeAgent, two_models
from tests.e2e.api import Manifest
from tests.e2e.audit import tiles
from tests.e2e.control_plane import ControlPlane
from tests.e2e.gputile import Replica, rights
from tests.e2e.machines import Machine
from tests.e2e.pods import container, events_of, real, tile
from tests.e2e.processes import wait_until
from tests.e2e.programs import Programs
from tests.e2e.test_metrics_api import POD_RESOURCE, serving

PATIENCE = 60.0  # seconds
MIB = 2**20
NODE, LEASES = "node-a", "gputile-agents"
LIMITS = {"gputile.io/gpu": 1, "gputile.io/memory": 4096}


class Site:
    """A machine whose agent reports use, and our scheduler. The pod `p` runs there with containers main and side."""

    def __init__(self, plane: ControlPlane, gputile: Replica, agent: NodeAgent, space: str) -> None:
        self.plane, self.kube, self.gputile, self.agent, self.space = plane, plane.kube, gputile, agent, space

    def use(self, name: str, memory: int | None) -> str:
        """From now on the driver says that the container's process holds this much of the pod's card; its UUID."""
        (card,) = {one["uuid"] for one in tiles(self.kube.get("Pod", "p", self.space))}
        (pid,) = [one.pid for one in self.agent.machine.containers() if (one.pod, one.name) == ("p", name)]
        machine = deepcopy(two_models("a"))
        next(one for one in machine.cards if one.uuid == card).process(pid, memory)
        self.agent.hardware(machine)
        return str(card)

    def said(self) -> ReportedUsage | None:
        lease = self.kube.find("Lease", NODE, LEASES) or {"metadata": {}}
        words = lease["metadata"].get("annotations", {})
        return read_usage(words["gputile.io/use"]) if "gputile.io/use" in words else None

    def says(self, name: str, card: str, used: CardUsage) -> bool:
        found, uid = self.said(), self.kube.get("Pod", "p", self.space)["metadata"]["uid"]
        return found is not None and found.pods.get(uid, {}).get(name, {}).get(card) == used

    def shown(self, name: str, card: str) -> float:
        """What the scheduler's /metrics says that the container uses."""
        return self.gputile.count("gputile_container_memory_used_bytes", **self.labels(name, card))

    def told(self, name: str) -> Manifest | None:
        """What the metrics API says that the container uses, if it does."""
        found = self.kube.get(POD_RESOURCE, "p", self.space)["spec"]["containers_device"]
        uses: list[Manifest | None] = [
            one.get("use") for held in found if held["container_name"] == name for one in held["device_info"]
        ]
        (use,) = uses
        return use

    def labels(self, name: str, card: str) -> dict[str, str]:
        return {"namespace": self.space, "pod": "p", "container": name, "uuid": card}


@pytest.fixture(scope="module")
def site(programs: Programs) -> Iterator[Site]:
    with ControlPlane(programs) as plane:
        rights(plane)
        agents.rights(plane)
        with (
            Machine(plane, NODE) as machine,
            serving(plane) as served,
            plane.start_scheduler(config=served.replica.config()),
            NodeAgent(machine, two_models("a"), report_use="true", hami_metrics="true") as agent,
        ):
            made = Site(plane, served.replica, agent, plane.namespace("use"))
            pod = tile("p", 4096)
            pod["spec"]["containers"].append(container("side", LIMITS))
            pod["metadata"]["annotations"]["gputile.io/policy"] = "binpack"
            plane.kube.create(real(pod), made.space)
            wait_until(
                lambda: made.kube.get("Pod", "p", made.space)["status"].get("phase") == "Running", PATIENCE, "runs"
            )
            yield made


def test_nobody_is_said_to_use_anything_at_first(site: Site) -> None:
    wait_until(lambda: (found := site.said()) is not None and len(found.cards) == 8, PATIENCE, "all cards answered")
    found = site.said()
    assert found is not None
    assert found.pods == {}
    assert site.agent.count("gputile_agent_gpu_processes") == 0
    assert site.gputile.count("gputile_container_memory_used_bytes", namespace=site.space) == 0
    assert site.gputile.count("gputile_container_memory_allocated_bytes", namespace=site.space) == 2 * 4096 * MIB


def test_a_process_is_its_containers_on_the_lease_and_in_both_pages(site: Site) -> None:
    card = site.use("side", 3000)
    wait_until(lambda: site.says("side", card, CardUsage(3000, None)), PATIENCE, "the Lease says it")
    labels = site.labels("side", card)
    assert site.agent.count("gputile_agent_container_memory_used_bytes", **labels) == 3000 * MIB
    assert site.agent.count("hami_vgpu_memory_used_bytes", pod="p", container="side", device_uuid=card) == 3000 * MIB
    wait_until(lambda: site.shown("side", card) == 3000 * MIB, PATIENCE, "the scheduler shows it")
    assert site.gputile.count("gputile_gpu_memory_used_bytes", uuid=card) == 3000 * MIB
    assert site.gputile.count("gputile_node_memory_used_bytes", node=NODE) == 3000 * MIB
    assert site.shown("main", card) == 0  # absent
    assert site.told("side") == {"memory": 3000}
    assert site.told("main") is None
    assert events_of(site.kube, site.space, "p", "GPUOverUse") == []


def test_who_takes_more_than_granted_is_told(site: Site) -> None:
    card = site.use("main", 2 * 4096 + 1000)
    wait_until(lambda: events_of(site.kube, site.space, "p", "GPUOverUse"), PATIENCE, "the pod is told")
    (event,) = events_of(site.kube, site.space, "p", "GPUOverUse")
    assert f"uses 9192 MiB of GPU {card} and was granted 8192 MiB of it" in event["message"]
    assert site.agent.count("gputile_agent_memory_overuse") == 1


def test_a_dead_agent_leaves_nothing_known(site: Site) -> None:
    card = site.use("main", 3000)
    wait_until(lambda: site.shown("main", card) == 3000 * MIB, PATIENCE, "the scheduler shows it")
    site.agent.kill()
    wait_until(lambda: site.shown("main", card) == 0, 12, "the scheduler shows no old figure")
    assert site.told("main") is None
    assert site.gputile.count("gputile_container_memory_allocated_bytes", **site.labels("main", card)) == 4096 * MIB
    site.agent.start()
    wait_until(lambda: site.shown("main", card) == 3000 * MIB, PATIENCE, "it is known again")
