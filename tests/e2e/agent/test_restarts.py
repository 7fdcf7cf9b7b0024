"""Kubelet, agent and node come and go; containers, cards and book stay right."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.e2e.agent.site import ON_A, ON_B, PATIENCE, SHOW_ENV, Site
from tests.e2e.audit import audit
from tests.e2e.pods import events_of, real, tile
from tests.e2e.processes import wait_until

STALE = 10.0  # seconds; a Lease is over after nine


def test_a_killed_kubelet_leaves_containers_alone_and_new_ones_start(site: Site, space: str) -> None:
    site.run(tile("old", 2048, **ON_A), space=space)
    before = set(site.containers(space))
    site.a.machine.restart_kubelet(kill=True)
    wait_until(site.a.serves, PATIENCE, "the agent registered again")
    site.run(tile("new", 2048, **ON_A), space=space)
    assert before < set(site.containers(space))
    site.assert_own_cards(space)
    audit(site.kube)


def test_a_killed_agent_comes_back_to_the_same_truth(site: Site, space: str) -> None:
    site.run(tile("old", 2048, **ON_A), space=space)
    before = set(site.containers(space))
    site.a.kill()
    site.a.start(wait=False)
    wait_until(lambda: site.a.count("gputile_agent_registered", resource="gputile.io/gpu") == 1, 30, "registered again")
    wait_until(site.a.serves, PATIENCE, "it serves again")
    site.run(tile("new", 2048, **ON_A), space=space)
    assert before < set(site.containers(space))
    site.assert_own_cards(space)
    audit(site.kube)
    wait_until(lambda: site.a.count("gputile_agent_consistency_checks_total") >= 1, 15, "it has compared")
    assert site.a.count("gputile_agent_inconsistencies") == 0


def test_containers_that_wait_to_start_do_start_after_the_agent_was_killed(site: Site, space: str) -> None:
    with four_waiting(site, space):
        site.a.kill()
        site.a.start(wait=False)
    wait_until(lambda: len(site.running(space)) == 4, PATIENCE, "they run")
    site.assert_own_cards(space)
    audit(site.kube)


def test_containers_that_wait_to_start_do_start_after_the_kubelet_was_killed(site: Site, space: str) -> None:
    with four_waiting(site, space):
        site.a.machine.restart_kubelet(kill=True)
    wait_until(lambda: len(site.running(space)) == 4, PATIENCE, "they run")
    site.assert_own_cards(space)
    audit(site.kube)


@contextmanager
def four_waiting(site: Site, space: str) -> Iterator[None]:
    """Four pods whose devices are allocated and whose starts are held: nobody grants, for our scheduler is frozen."""

    def allocated() -> float:
        return site.a.count("gputile_agent_allocations_total", resource="gputile.io/gpu")

    site.gputile.child.signal(signal.SIGSTOP)
    try:
        before = allocated()
        site.kube.create_many([real(tile(f"p{n}", 2048), node="node-a", says=SHOW_ENV) for n in range(4)], space)
        wait_until(lambda: allocated() == before + 4, 20, "their devices are allocated")
        yield
    finally:
        site.gputile.child.signal(signal.SIGCONT)


def test_without_its_agent_a_node_takes_no_pods_and_those_in_the_gap_are_told(site: Site, space: str) -> None:
    site.run(tile("before", 2048, **ON_B), space=space)
    containers, failures = set(site.containers(space)), site.gputile.count("gputile_admission_failures_total")
    site.b.kill()
    site.kube.create(real(tile("gap", 2048), node="node-b"), space)  # around every scheduler, in the gap
    wait_until(lambda: site.phase("gap", space) == "Failed", 30, "the kubelet turned it away")
    assert site.kube.get("Pod", "gap", space)["status"]["reason"] == "UnexpectedAdmissionError"
    wait_until(lambda: events_of(site.kube, space, "gap", "AdmissionFailed"), 20, "it is told")
    assert site.gputile.count("gputile_admission_failures_total") == failures + 1
    time.sleep(STALE)
    site.kube.create(real(tile("waits", 2048, **ON_B), says=SHOW_ENV), space)
    wait_until(lambda: events_of(site.kube, space, "waits", "FailedScheduling"), 20, "it is told why it waits")
    assert not site.is_bound("waits", space)
    assert containers <= set(site.containers(space))
    site.b.start()
    wait_until(lambda: "waits" in site.running(space), PATIENCE, "the one that waited runs")
    site.kube.delete("Pod", "gap", space, grace=0)
    site.assert_own_cards(space)
    audit(site.kube)


def test_an_agent_that_stops_withdraws_its_node_first(site: Site, space: str) -> None:
    site.b.child.stop()
    site.kube.create(real(tile("waits", 2048, **ON_B), says=SHOW_ENV), space)
    wait_until(lambda: events_of(site.kube, space, "waits", "FailedScheduling"), 20, "it is told why it waits")
    assert not site.is_bound("waits", space)
    site.b.start()
    wait_until(lambda: "waits" in site.running(space), PATIENCE, "it runs")


def test_a_node_that_reboots_leaves_no_leak(site: Site, space: str) -> None:
    site.run(*(tile(f"p{n}", 2048, **ON_B) for n in range(4)), space=space)
    site.b.child.stop()
    site.b.machine.reboot()
    assert not list(site.b.machine.disk.cdi.glob("*"))
    site.b.start()

    def settled() -> bool:
        """Those the kubelet failed before our plugin was there are over; the others run."""
        phases = [found["status"].get("phase") for found in site.kube.list("Pod", space)]
        return set(phases) <= {"Running", "Failed"} and len(site.containers(space)) == phases.count("Running")

    wait_until(settled, 90, "every pod runs again or has failed")
    for found in site.kube.list("Pod", space):
        if found["status"]["phase"] == "Failed":  # its controller's part
            site.kube.delete("Pod", found["metadata"]["name"], space, grace=0)
    site.run(*(tile(f"again-{n}", 14000, cards=8, **ON_B) for n in range(1)), space=space)  # every card has its room
    site.assert_own_cards(space)
    audit(site.kube)
    specs = [path.name.split("_")[1] for path in site.b.machine.disk.cdi.glob("gputile.io-slot_*")]
    assert set(specs) == {found["metadata"]["uid"] for found in site.kube.list("Pod", space)}
