"""Pods that are gone while their containers run on."""

from gputile.agent.node_pods import NodePod, NodePods
from gputile.agent.orphaned_pods import OrphanContainers
from gputile.dialects.kube_objects import Pod
from gputile.dialects.settings import DEFAULTS
from gputile.model.grants import Grant
from tests.agent.rig import CARDS, granted, tile, ungranted


async def node_pods(*pods: Pod) -> list[NodePod]:
    made = NodePods(DEFAULTS)
    await made.serves(CARDS, "")
    await made.listed(pods)
    return made.all()


class TestLingering:
    async def test_a_pod_that_is_there_does_not_linger(self) -> None:
        assert OrphanContainers().compare(await node_pods(granted("a", tile(0))), {"a"}) == ()

    async def test_one_that_went_and_runs_on_does_until_it_ends(self) -> None:
        orphans, here = OrphanContainers(), await node_pods(granted("a", tile(0)), granted("b", tile(1)))
        orphans.compare(here, {"a", "b"})
        left = [one for one in here if one.pod.uid == "b"]
        assert [grant.pod for grant in orphans.compare(left, {"a", "b"})] == ["a"]
        assert [grant.pod for grant in orphans.compare(left, {"a", "b"})] == ["a"]
        assert orphans.compare(left, {"b"}) == ()
        assert orphans.compare(left, {"a", "b"}) == ()  # its UID never comes back; what runs under it is not known

    async def test_one_that_ended_before_it_went_does_not(self) -> None:
        orphans = OrphanContainers()
        orphans.compare(await node_pods(granted("a", tile(0))), set())
        assert orphans.compare([], set()) == ()

    async def test_one_without_a_card_is_none_of_our_business(self) -> None:
        orphans = OrphanContainers()
        orphans.compare(await node_pods(ungranted("a")), {"a"})
        assert orphans.compare([], {"a"}) == ()

    async def test_what_an_agent_before_us_named_is_known(self) -> None:
        orphans = OrphanContainers()
        (one,) = await node_pods(granted("a", tile(0)))
        assert isinstance(one.grant, Grant)
        orphans.restore([one.grant])
        assert [grant.pod for grant in orphans.compare([], {"a"})] == ["a"]
        assert orphans.compare([], set()) == ()

    async def test_where_nobody_says_what_runs_no_name_is_let_go(self) -> None:
        orphans = OrphanContainers()
        (one,) = await node_pods(granted("a", tile(0)))
        assert isinstance(one.grant, Grant)
        orphans.restore([one.grant])
        assert [grant.pod for grant in orphans.kept([])] == ["a"]
        assert orphans.kept([one]) == ()
