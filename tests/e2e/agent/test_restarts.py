"""Restarts of kubelet, agent and node: containers keep running, and their cards and the ledger stay correct."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.e2e.agent.site import ON_A, ON_B, PATIENCE, SHOW_ENV, Site
from tests.e2e.audit import audit
from tests.e2e.pods import events_of, real, tile
from tests.e2e.processes import wait_until

STALE = 10.0  # seconds; a Lease expires after nine


def test_after_a_killed_kubelet_containers_keep_running_and_new_ones_start(site: Site, space: str) -> None:
    site.run(tile("old", 2048, **ON_A), space=space)
    before = set(site.containers(space))
    site.a.machine.restart_kubelet(kill=True)
    wait_until(site.a.serves, PATIENCE, "the agent registered again")
    site.run(tile("new", 2048, **ON_A), space=space)
    assert before < set(site.containers(space))
    site.assert_own_cards(space)
    audit(site.kube)


def test_after_a_killed_agent_containers_keep_running_and_new_ones_start(site: Site, space: str) -> None:
    site.run(tile("old", 2048, **ON_A), space=space)
    before = set(site.containers(space))
    site.a.kill()
    site.a.start(wait=False)
    wait_until(
        lambda: site.a.count("gputile_agent_registered", resource="gputile.io/gpu") == 1,
        30,
        "the agent is registered again",
    )
    wait_until(site.a.serves, PATIENCE, "the node offers devices again")
    site.run(tile("new", 2048, **ON_A), space=space)
    assert before < set(site.containers(space))
    site.assert_own_cards(space)
    audit(site.kube)
    wait_until(lambda: site.a.count("gputile_agent_consistency_checks_total") >= 1, 15, "a consistency check has run")
    assert site.a.count("gputile_agent_inconsistencies") == 0


def test_containers_that_were_starting_run_after_the_agent_was_killed(site: Site, space: str) -> None:
    with four_starting(site, space):
        site.a.kill()
        site.a.start(wait=False)
    wait_until(lambda: len(site.running(space)) == 4, PATIENCE, "all four run")
    site.assert_own_cards(space)
    audit(site.kube)


def test_containers_that_were_starting_run_after_the_kubelet_was_killed(site: Site, space: str) -> None:
    with four_starting(site, space):
        site.a.machine.restart_kubelet(kill=True)
    wait_until(lambda: len(site.running(space)) == 4, PATIENCE, "all four run")
    site.assert_own_cards(space)
    audit(site.kube)


@contextmanager
def four_starting(site: Site, space: str) -> Iterator[None]:
    """Four pods with allocated devices that cannot start: gputile's scheduler is frozen, so they have no grant."""

    def allocated() -> float:
        return site.a.count("gputile_agent_allocations_total", resource="gputile.io/gpu")

    site.gputile.child.signal(signal.SIGSTOP)
    try:
        before = allocated()
        site.kube.create_many([real(tile(f"p{n}", 2048), node="node-a", script=SHOW_ENV) for n in range(4)], space)
        wait_until(lambda: allocated() == before + 4, 20, "their devices are allocated")
        yield
    finally:
        site.gputile.child.signal(signal.SIGCONT)


def test_without_its_agent_a_node_gets_no_pods_and_pods_already_bound_fail_with_an_event(
    site: Site, space: str
) -> None:
    site.run(tile("before", 2048, **ON_B), space=space)
    containers, failures = set(site.containers(space)), site.gputile.count("gputile_admission_failures_total")
    site.b.kill()
    site.kube.create(real(tile("gap", 2048), node="node-b"), space)  # bound without a scheduler
    wait_until(lambda: site.phase("gap", space) == "Failed", 30, "the kubelet rejected it")
    assert site.kube.get("Pod", "gap", space)["status"]["reason"] == "UnexpectedAdmissionError"
    wait_until(lambda: events_of(site.kube, space, "gap", "AdmissionFailed"), 20, "the pod has an event")
    assert site.gputile.count("gputile_admission_failures_total") == failures + 1
    time.sleep(STALE)
    site.kube.create(real(tile("pending", 2048, **ON_B), script=SHOW_ENV), space)
    wait_until(lambda: events_of(site.kube, space, "pending", "FailedScheduling"), 20, "an event with the reason")
    assert not site.is_bound("pending", space)
    assert containers <= set(site.containers(space))
    site.b.start()
    wait_until(lambda: "pending" in site.running(space), PATIENCE, "the pending pod runs")
    site.kube.delete("Pod", "gap", space, grace=0)
    site.assert_own_cards(space)
    audit(site.kube)


def test_a_stopping_agent_withdraws_its_node_first(site: Site, space: str) -> None:
    site.b.child.stop()
    site.kube.create(real(tile("pending", 2048, **ON_B), script=SHOW_ENV), space)
    wait_until(lambda: events_of(site.kube, space, "pending", "FailedScheduling"), 20, "an event with the reason")
    assert not site.is_bound("pending", space)
    site.b.start()
    wait_until(lambda: "pending" in site.running(space), PATIENCE, "the pending pod runs")


def test_a_rebooted_node_has_no_leaked_tiles_or_files(site: Site, space: str) -> None:
    site.run(*(tile(f"p{n}", 2048, **ON_B) for n in range(4)), space=space)
    site.b.child.stop()
    site.b.machine.reboot()
    assert not list(site.b.machine.disk.cdi.glob("*"))
    site.b.start()

    def settled() -> bool:
        """Pods that the kubelet rejected before the plugin registered have failed; the others run."""
        phases = [pod["status"].get("phase") for pod in site.kube.list("Pod", space)]
        return set(phases) <= {"Running", "Failed"} and len(site.containers(space)) == phases.count("Running")

    wait_until(settled, 90, "every pod runs again or has failed")
    for pod in site.kube.list("Pod", space):
        if pod["status"]["phase"] == "Failed":  # as its controller does
            site.kube.delete("Pod", pod["metadata"]["name"], space, grace=0)
    site.run(*(tile(f"again-{n}", 14000, cards=8, **ON_B) for n in range(1)), space=space)  # every card is free
    site.assert_own_cards(space)
    audit(site.kube)
    specs = [path.name.split("_")[1] for path in site.b.machine.disk.cdi.glob("gputile.io-slot_*")]
    assert set(specs) == {pod["metadata"]["uid"] for pod in site.kube.list("Pod", space)}
