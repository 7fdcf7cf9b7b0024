"""Pods that are gone from the API server while their containers still run."""

from gputile.agent.node_pods import NodePod, NodePods
from gputile.agent.orphaned_pods import OrphanContainers
from gputile.dialects.kube_objects import Pod
from gputile.dialects.settings import DEFAULTS
from gputile.model.grants import Grant
from tests.agent.rig import CARDS, granted, tile, ungranted


async def node_pods(*pods: Pod) -> list[NodePod]:
    node_pods = NodePods(DEFAULTS)
    await node_pods.set_cards(CARDS, "")
    await node_pods.listed(pods)
    return node_pods.all()


class TestOrphanedPods:
    """Which pods count as orphaned, and for how long."""

    async def test_a_listed_pod_is_not_orphaned(self) -> None:
        assert OrphanContainers().update(await node_pods(granted("a", tile(0))), {"a"}) == ()

    async def test_a_deleted_pod_is_orphaned_until_its_containers_end(self) -> None:
        orphans, before = OrphanContainers(), await node_pods(granted("a", tile(0)), granted("b", tile(1)))
        orphans.update(before, {"a", "b"})
        left = [node_pod for node_pod in before if node_pod.pod.uid == "b"]
        assert [grant.pod for grant in orphans.update(left, {"a", "b"})] == ["a"]
        assert [grant.pod for grant in orphans.update(left, {"a", "b"})] == ["a"]
        assert orphans.update(left, {"b"}) == ()
        assert orphans.update(left, {"a", "b"}) == ()  # once dropped, its grant is unknown; a UID is never reused

    async def test_a_pod_that_ended_before_its_deletion_is_not_orphaned(self) -> None:
        orphans = OrphanContainers()
        orphans.update(await node_pods(granted("a", tile(0))), set())
        assert orphans.update([], set()) == ()

    async def test_a_pod_without_a_grant_is_ignored(self) -> None:
        orphans = OrphanContainers()
        orphans.update(await node_pods(ungranted("a")), {"a"})
        assert orphans.update([], {"a"}) == ()

    async def test_orphaned_pods_of_an_earlier_agent_are_known(self) -> None:
        orphans = OrphanContainers()
        (node_pod,) = await node_pods(granted("a", tile(0)))
        assert isinstance(node_pod.grant, Grant)
        orphans.restore([node_pod.grant])
        assert [grant.pod for grant in orphans.update([], {"a"})] == ["a"]
        assert orphans.update([], set()) == ()

    async def test_without_a_runtime_no_orphaned_pod_is_dropped(self) -> None:
        orphans = OrphanContainers()
        (node_pod,) = await node_pods(granted("a", tile(0)))
        assert isinstance(node_pod.grant, Grant)
        orphans.restore([node_pod.grant])
        assert [grant.pod for grant in orphans.unlisted([])] == ["a"]
        assert orphans.unlisted([node_pod]) == ()
