"""GPU usage of a real container's process: from the driver to the Lease, both /metrics pages and the metrics API."""

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
    """A machine whose agent reports usage, and a scheduler. The pod `p` runs there with containers main and side."""

    def __init__(self, plane: ControlPlane, gputile: Replica, agent: NodeAgent, space: str) -> None:
        self.plane, self.kube, self.gputile, self.agent, self.space = plane, plane.kube, gputile, agent, space

    def use(self, name: str, memory: int | None) -> str:
        """Make the driver report this memory for the container's process on the pod's card; return the card's UUID."""
        (card,) = {it["uuid"] for it in tiles(self.kube.get("Pod", "p", self.space))}
        (pid,) = [it.pid for it in self.agent.machine.containers() if (it.pod, it.name) == ("p", name)]
        machine = deepcopy(two_models("a"))
        next(it for it in machine.cards if it.uuid == card).process(pid, memory)
        self.agent.hardware(machine)
        return str(card)

    def reported(self) -> ReportedUsage | None:
        lease = self.kube.find("Lease", NODE, LEASES) or {"metadata": {}}
        annotations = lease["metadata"].get("annotations", {})
        return read_usage(annotations["gputile.io/use"]) if "gputile.io/use" in annotations else None

    def reports(self, name: str, card: str, used: CardUsage) -> bool:
        usage, uid = self.reported(), self.kube.get("Pod", "p", self.space)["metadata"]["uid"]
        return usage is not None and usage.pods.get(uid, {}).get(name, {}).get(card) == used

    def scraped(self, name: str, card: str) -> float:
        """The usage of the container in the scheduler's /metrics, in bytes; 0 if absent."""
        return self.gputile.count("gputile_container_memory_used_bytes", **self.labels(name, card))

    def in_metrics_api(self, name: str) -> Manifest | None:
        """The usage of the container in the metrics API; None if unknown."""
        containers = self.kube.get(POD_RESOURCE, "p", self.space)["spec"]["containers_device"]
        uses: list[Manifest | None] = [
            it.get("use") for held in containers if held["container_name"] == name for it in held["device_info"]
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
            site = Site(plane, served.replica, agent, plane.namespace("use"))
            pod = tile("p", 4096)
            pod["spec"]["containers"].append(container("side", LIMITS))
            pod["metadata"]["annotations"]["gputile.io/policy"] = "binpack"
            plane.kube.create(real(pod), site.space)
            wait_until(
                lambda: site.kube.get("Pod", "p", site.space)["status"].get("phase") == "Running",
                PATIENCE,
                "the pod runs",
            )
            yield site


def test_without_processes_no_usage_is_reported(site: Site) -> None:
    wait_until(lambda: (usage := site.reported()) is not None and len(usage.cards) == 8, PATIENCE, "all cards reported")
    usage = site.reported()
    assert usage is not None
    assert usage.pods == {}
    assert site.agent.count("gputile_agent_gpu_processes") == 0
    assert site.gputile.count("gputile_container_memory_used_bytes", namespace=site.space) == 0
    assert site.gputile.count("gputile_container_memory_allocated_bytes", namespace=site.space) == 2 * 4096 * MIB


def test_the_usage_of_a_process_is_attributed_to_its_container_everywhere(site: Site) -> None:
    card = site.use("side", 3000)
    wait_until(lambda: site.reports("side", card, CardUsage(3000, None)), PATIENCE, "the Lease has the usage")
    labels = site.labels("side", card)
    assert site.agent.count("gputile_agent_container_memory_used_bytes", **labels) == 3000 * MIB
    assert site.agent.count("hami_vgpu_memory_used_bytes", pod="p", container="side", device_uuid=card) == 3000 * MIB
    wait_until(lambda: site.scraped("side", card) == 3000 * MIB, PATIENCE, "the scheduler's metric")
    assert site.gputile.count("gputile_gpu_memory_used_bytes", uuid=card) == 3000 * MIB
    assert site.gputile.count("gputile_node_memory_used_bytes", node=NODE) == 3000 * MIB
    assert site.scraped("main", card) == 0  # absent
    assert site.in_metrics_api("side") == {"memory": 3000}
    assert site.in_metrics_api("main") is None
    assert events_of(site.kube, site.space, "p", "GPUOverUse") == []


def test_a_pod_that_uses_more_than_granted_has_an_event(site: Site) -> None:
    card = site.use("main", 2 * 4096 + 1000)
    wait_until(lambda: events_of(site.kube, site.space, "p", "GPUOverUse"), PATIENCE, "the event")
    (event,) = events_of(site.kube, site.space, "p", "GPUOverUse")
    assert f"uses 9192 MiB of GPU {card} and was granted 8192 MiB of it" in event["message"]
    assert site.agent.count("gputile_agent_memory_overuse") == 1


def test_the_usage_is_unknown_after_the_agent_died(site: Site) -> None:
    card = site.use("main", 3000)
    wait_until(lambda: site.scraped("main", card) == 3000 * MIB, PATIENCE, "the scheduler's metric")
    site.agent.kill()
    wait_until(lambda: site.scraped("main", card) == 0, 12, "the scheduler drops the old value")
    assert site.in_metrics_api("main") is None
    assert site.gputile.count("gputile_container_memory_allocated_bytes", **site.labels("main", card)) == 4096 * MIB
    site.agent.start()
    wait_until(lambda: site.scraped("main", card) == 3000 * MIB, PATIENCE, "the scheduler's metric is back")
