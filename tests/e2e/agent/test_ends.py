"""A tile is free when its container is gone, not before."""

import time

from tests.e2e.agent.site import DEAF, ON_A, PATIENCE, Site
from tests.e2e.api import Manifest
from tests.e2e.audit import tiles
from tests.e2e.pods import real, tile
from tests.e2e.processes import wait_until

WHOLE = 80000  # MiB: no two on one card


def deaf(name: str, seconds: int) -> Manifest:
    """A pod that its kubelet has to kill, after as many seconds."""
    made = real(tile(name, WHOLE, **ON_A))
    made["spec"]["terminationGracePeriodSeconds"] = seconds
    made["spec"]["containers"][0]["command"] = DEAF
    return made


def test_a_tile_is_free_only_when_the_container_is_gone(site: Site, space: str) -> None:
    site.kube.create(deaf("slow", 4), space)
    wait_until(lambda: site.running(space), PATIENCE, "it runs")
    card = tiles(site.kube.get("Pod", "slow", space))[0]["uuid"]
    site.kube.delete("Pod", "slow", space)
    site.kube.create(real(tile("next", WHOLE, annotations={"gputile.io/uuid": card})), space)
    time.sleep(1.5)
    assert not site.is_bound("next", space)
    _bound_after(site, space, "next", "slow")


def test_a_pod_deleted_by_force_keeps_its_tile_while_its_container_runs(site: Site, space: str) -> None:
    site.kube.create(deaf("stubborn", 8), space)
    wait_until(lambda: site.running(space), PATIENCE, "it runs")
    card = tiles(site.kube.get("Pod", "stubborn", space))[0]["uuid"]
    site.kube.delete("Pod", "stubborn", space)  # the kubelet begins to end it, and is held up
    site.kube.delete("Pod", "stubborn", space, grace=0)
    wait_until(lambda: site.kube.find("Pod", "stubborn", space) is None, 5, "its object is gone")
    assert site.containers(space, "stubborn")
    site.kube.create(real(tile("heir", WHOLE, annotations={"gputile.io/uuid": card})), space)
    _bound_after(site, space, "heir", "stubborn")


def test_the_files_of_a_pod_go_with_it(site: Site, space: str) -> None:
    uid = site.run(tile("brief", 2048, **ON_A), space=space)["brief"]["metadata"]["uid"]
    folder = site.a.machine.disk.cdi
    assert list(folder.glob(f"gputile.io-slot_{uid}_*"))
    site.clear(space)
    wait_until(lambda: not list(folder.glob(f"gputile.io-slot_{uid}_*")), 30, "its slot is removed")


def _bound_after(site: Site, space: str, heir: str, before: str) -> None:
    def bound() -> bool:
        if not site.is_bound(heir, space):
            return False
        assert not site.containers(space, before), "the tile was sold while the container ran"
        return True

    wait_until(bound, 60, f"{heir} is bound")
