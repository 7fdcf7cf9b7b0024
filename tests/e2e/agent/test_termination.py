"""A tile is free only after its container has terminated."""

import time

from tests.e2e.agent.site import IGNORES_SIGTERM, ON_A, PATIENCE, Site
from tests.e2e.api import Manifest
from tests.e2e.audit import tiles
from tests.e2e.pods import real, tile
from tests.e2e.processes import wait_until

WHOLE = 80000  # MiB: no two on one card


def ignoring_sigterm(name: str, seconds: int) -> Manifest:
    """A pod that its kubelet has to kill after this grace period."""
    manifest = real(tile(name, WHOLE, **ON_A))
    manifest["spec"]["terminationGracePeriodSeconds"] = seconds
    manifest["spec"]["containers"][0]["command"] = IGNORES_SIGTERM
    return manifest


def test_a_tile_is_free_only_after_its_container_has_terminated(site: Site, space: str) -> None:
    site.kube.create(ignoring_sigterm("slow", 4), space)
    wait_until(lambda: site.running(space), PATIENCE, "the pod runs")
    card = tiles(site.kube.get("Pod", "slow", space))[0]["uuid"]
    site.kube.delete("Pod", "slow", space)
    site.kube.create(real(tile("next", WHOLE, annotations={"gputile.io/uuid": card})), space)
    time.sleep(1.5)
    assert not site.is_bound("next", space)
    _bound_after(site, space, "next", "slow")


def test_a_pod_deleted_by_force_keeps_its_tile_while_its_container_runs(site: Site, space: str) -> None:
    site.kube.create(ignoring_sigterm("stubborn", 8), space)
    wait_until(lambda: site.running(space), PATIENCE, "the pod runs")
    card = tiles(site.kube.get("Pod", "stubborn", space))[0]["uuid"]
    site.kube.delete("Pod", "stubborn", space)  # the kubelet begins to terminate it
    site.kube.delete("Pod", "stubborn", space, grace=0)
    wait_until(lambda: site.kube.find("Pod", "stubborn", space) is None, 5, "its object is gone")
    assert site.containers(space, "stubborn")
    site.kube.create(real(tile("successor", WHOLE, annotations={"gputile.io/uuid": card})), space)
    _bound_after(site, space, "successor", "stubborn")


def test_the_cdi_files_of_a_pod_are_removed_with_it(site: Site, space: str) -> None:
    uid = site.run(tile("brief", 2048, **ON_A), space=space)["brief"]["metadata"]["uid"]
    folder = site.a.machine.disk.cdi
    assert list(folder.glob(f"gputile.io-slot_{uid}_*"))
    site.clear(space)
    wait_until(lambda: not list(folder.glob(f"gputile.io-slot_{uid}_*")), 30, "its files are removed")


def _bound_after(site: Site, space: str, successor: str, before: str) -> None:
    def bound() -> bool:
        if not site.is_bound(successor, space):
            return False
        assert not site.containers(space, before), "the tile was allocated while the container ran"
        return True

    wait_until(bound, 60, f"{successor} is bound")
