"""Pods that are gone while their containers run on."""

from gputile.agent.node_pods import Resident, Residents
from gputile.agent.orphaned_pods import Lingering
from gputile.dialects.kube_objects import Pod
from gputile.dialects.settings import DEFAULTS
from gputile.model.grants import Grant
from tests.agent.rig import CARDS, granted, tile, ungranted


async def residents(*pods: Pod) -> list[Resident]:
    made = Residents(DEFAULTS)
    await made.serves(CARDS, "")
    await made.listed(pods)
    return made.all()


class TestLingering:
    async def test_a_pod_that_is_there_does_not_linger(self) -> None:
        assert Lingering().compare(await residents(granted("a", tile(0))), {"a"}) == ()

    async def test_one_that_went_and_runs_on_does_until_it_ends(self) -> None:
        lingering, here = Lingering(), await residents(granted("a", tile(0)), granted("b", tile(1)))
        lingering.compare(here, {"a", "b"})
        left = [one for one in here if one.pod.uid == "b"]
        assert [grant.pod for grant in lingering.compare(left, {"a", "b"})] == ["a"]
        assert [grant.pod for grant in lingering.compare(left, {"a", "b"})] == ["a"]
        assert lingering.compare(left, {"b"}) == ()
        assert lingering.compare(left, {"a", "b"}) == ()  # its UID never comes back; what runs under it is not known

    async def test_one_that_ended_before_it_went_does_not(self) -> None:
        lingering = Lingering()
        lingering.compare(await residents(granted("a", tile(0))), set())
        assert lingering.compare([], set()) == ()

    async def test_one_without_a_card_is_none_of_our_business(self) -> None:
        lingering = Lingering()
        lingering.compare(await residents(ungranted("a")), {"a"})
        assert lingering.compare([], {"a"}) == ()

    async def test_what_an_agent_before_us_named_is_known(self) -> None:
        lingering = Lingering()
        (one,) = await residents(granted("a", tile(0)))
        assert isinstance(one.grant, Grant)
        lingering.recall([one.grant])
        assert [grant.pod for grant in lingering.compare([], {"a"})] == ["a"]
        assert lingering.compare([], set()) == ()

    async def test_where_nobody_says_what_runs_no_name_is_let_go(self) -> None:
        lingering = Lingering()
        (one,) = await residents(granted("a", tile(0)))
        assert isinstance(one.grant, Grant)
        lingering.recall([one.grant])
        assert [grant.pod for grant in lingering.kept([])] == ["a"]
        assert lingering.kept([one]) == ()
