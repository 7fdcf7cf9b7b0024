"""Pods that are gone while their containers run on, and processes that take more than they were given."""

from pathlib import Path

import pytest

from gputile.agent.lingering import Lingering
from gputile.agent.residents import Resident, Residents
from gputile.agent.using import over_use, pod_of, used_by_pods
from gputile.dialects.settings import DEFAULTS
from gputile.dialects.wire import Pod
from gputile.model.grants import Grant
from gputile.nvml.values import Process
from tests.agent.rig import CARDS, granted, tile, ungranted


async def residents(*pods: Pod) -> list[Resident]:
    made = Residents(DEFAULTS)
    await made.cards_are(CARDS)
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


UID = "0f3c1a2b-1111-2222-3333-444455556666"
CONTAINER = "c" * 64


class TestWhoseProcess:
    @pytest.mark.parametrize(
        ("groups", "uid"),
        [
            pytest.param(f"4:memory:/kubepods/burstable/pod{UID}/{CONTAINER}\n", UID, id="cgroupfs"),
            pytest.param(
                f"0::/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice/cri-containerd-{CONTAINER}.scope\n",
                UID,
                id="systemd",
            ),
            pytest.param(f"4:memory:/k8s.io/{CONTAINER}\n", "uid-by-container", id="only-the-container-is-named"),
            pytest.param("0::/user.slice/session-1.scope\n", "", id="a-person"),
        ],
    )
    def test_by_control_group(self, tmp_path: Path, groups: str, uid: str) -> None:
        (tmp_path / "7").mkdir()
        (tmp_path / "7" / "cgroup").write_text(groups)
        assert pod_of(7, {CONTAINER: "uid-by-container"}, tmp_path) == uid

    def test_a_process_that_went(self, tmp_path: Path) -> None:
        assert pod_of(7, {}, tmp_path) == ""

    def test_processes_of_one_pod_add_up_and_what_is_not_said_is_not_counted(self, tmp_path: Path) -> None:
        for pid in (1, 2, 3):
            (tmp_path / str(pid)).mkdir()
            (tmp_path / str(pid) / "cgroup").write_text(f"0::/kubepods/pod{UID}/{CONTAINER}\n")
        processes = [Process(pid=1, memory=100), Process(pid=2, memory=50), Process(pid=3)]
        assert used_by_pods("GPU-0", processes, {}, tmp_path) == {(UID, "GPU-0"): 150}


class TestOverUse:
    @pytest.mark.parametrize(
        ("used", "count"),
        [
            pytest.param({("a", "GPU-0"): 4096}, 0, id="as-granted"),
            pytest.param({("a", "GPU-0"): 4096 + 512}, 0, id="with-the-drivers-own"),
            pytest.param({("a", "GPU-0"): 4096 + 513}, 1, id="more"),
            pytest.param({("a", "GPU-1"): 1}, 1, id="a-card-it-was-not-given"),
            pytest.param({("stranger", "GPU-0"): 9999}, 0, id="nobody-of-ours"),
        ],
    )
    async def test_table(self, used: dict[tuple[str, str], int], count: int) -> None:
        found = over_use(await residents(granted("a", tile(0))), used, 512)
        assert len(found) == count

    async def test_the_sentence_has_the_figures(self) -> None:
        (one,) = over_use(await residents(granted("a", tile(0))), {("a", "GPU-0"): 9000}, 512)
        assert one.sentence == "its processes use 9000 MiB of card GPU-0, of which it was granted 4096 MiB"
