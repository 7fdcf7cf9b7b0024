"""A node whose runtime ignores CDI: the agent detects and reports it, and each container still gets its own card."""

from collections.abc import Iterator

import pytest

from tests.e2e.agent.site import ON_B, PATIENCE, SHOW_ENV, Site
from tests.e2e.agents import condition
from tests.e2e.audit import audit
from tests.e2e.pods import real, tile
from tests.e2e.processes import wait_until


@pytest.fixture
def no_cdi(site: Site) -> Iterator[None]:
    """node-b's containerd runs with CDI disabled."""
    _set(site, "enable_cdi = true", "enable_cdi = false")
    yield
    _set(site, "enable_cdi = false", "enable_cdi = true")


def _set(site: Site, old: str, new: str) -> None:
    machine = site.b.machine
    file = machine.disk.folder / "containerd.toml"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    site.b.child.stop()
    machine.stop_containerd()
    machine.start_containerd()
    site.b.start()


def test_without_cdi_pods_start_one_at_a_time_and_get_their_own_cards(site: Site, space: str, no_cdi: None) -> None:
    wait_until(lambda: condition(site.kube.get("Node", "node-b"))["reason"] == "NoCDI", 15, "the node's condition")
    assert site.b.count("gputile_agent_has_cdi") == 0
    site.run(*(tile(f"p{n}", 2048, **ON_B) for n in range(6)), space=space)
    site.assert_own_cards(space)
    audit(site.kube)


def test_without_cdi_a_pod_bound_by_another_scheduler_is_granted_and_sees_its_own_card(
    site: Site, space: str, no_cdi: None
) -> None:
    site.kube.create(real(tile("bypassing", 2048), node="node-b", script=SHOW_ENV), space)
    wait_until(lambda: site.phase("bypassing", space) == "Running", PATIENCE, "the pod runs")
    site.assert_own_cards(space)


def test_an_isolation_that_needs_cdi_is_rejected_with_a_reason(site: Site, space: str, no_cdi: None) -> None:
    site.kube.create(real(tile("isolated", 2048, annotations={"gputile.io/isolation": "devices"}, **ON_B)), space)
    wait_until(lambda: site.phase("isolated", space) == "Failed", PATIENCE, "the kubelet rejected it")
    assert "isolation `devices` needs CDI" in site.kube.get("Pod", "isolated", space)["status"]["message"]
