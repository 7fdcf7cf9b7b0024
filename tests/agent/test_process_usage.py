"""Whose process it is, what that adds up to, and who takes more than was granted."""

from pathlib import Path

import pytest

from gputile.agent.node_pods import NodePods
from gputile.agent.process_usage import ProcessShare, by_pod, look, over_use, owner_of, usage
from gputile.dialects.kube_objects import Pod
from gputile.dialects.settings import DEFAULTS
from gputile.kubelet.cri import RunningContainer
from gputile.model.usage import CardUsage
from gputile.nvml.driver import GpuProcess
from gputile.nvml.fake import FakeDriver, cards
from tests.agent.rig import CARDS, granted, tile

UID, OTHER = "0f3c1a2b-1111-2222-3333-444455556666", "0f3c1a2b-9999-2222-3333-444455556666"
ID, NESTED, STRANGE = "c" * 64, "d" * 64, "e" * 64
RUNNING = {ID: RunningContainer(UID, "main")}
SYSTEMD = f"kubepods-pod{UID.replace('-', '_')}.slice"


async def node_pods(*pods: Pod) -> NodePods:
    made = NodePods(DEFAULTS)
    await made.serves(CARDS, "")
    await made.listed(pods)
    return made


def process(folder: Path, pid: int, groups: str) -> None:
    (folder / str(pid)).mkdir()
    (folder / str(pid) / "cgroup").write_text(groups)


class TestWhose:
    @pytest.mark.parametrize(
        ("groups", "owner"),
        [
            pytest.param(f"4:memory:/kubepods/burstable/pod{UID}/{ID}\n", RunningContainer(UID, "main"), id="cgroupfs"),
            pytest.param(
                f"0::/kubepods.slice/{SYSTEMD}/cri-containerd-{ID}.scope\n", RunningContainer(UID, "main"), id="systemd"
            ),
            pytest.param(
                f"0::/../../{SYSTEMD}/crio-{ID}.scope\n", RunningContainer(UID, "main"), id="seen-from-another-group"
            ),
            pytest.param(f"4:memory:/k8s.io/{ID}\n", RunningContainer(UID, "main"), id="only-the-container-is-named"),
            pytest.param(
                f"0::/kubepods/pod{UID}/{ID}/docker/{NESTED}\n",
                RunningContainer(UID, "main"),
                id="a-container-inside-it",
            ),
            pytest.param(
                f"0::/kubepods/pod{UID}/{ID}/kubepods/pod{OTHER}/{NESTED}\n",
                RunningContainer(UID, "main"),
                id="a-pod-inside-it",
            ),
            pytest.param(
                f"0::/kubepods/pod{UID}/{STRANGE}\n", RunningContainer(UID), id="a-container-that-is-not-known-yet"
            ),
            pytest.param(f"0::/kubepods/pod{UID}\n", RunningContainer(UID), id="only-the-pod-is-named"),
            pytest.param(f"0::/kubepods/pod{OTHER}/{STRANGE}\n", None, id="a-pod-that-is-not-known"),
            pytest.param(f"0::/kubepods/pod{OTHER}/{ID}\n", None, id="runtime-and-group-contradict-each-other"),
            pytest.param(f"0::/system.slice/docker-{STRANGE}.scope\n", None, id="a-container-of-somebody-else"),
            pytest.param("0::/user.slice/session-1.scope\n", None, id="a-person"),
            pytest.param("", None, id="nothing-is-said"),
        ],
    )
    def test_by_control_group(self, tmp_path: Path, groups: str, owner: RunningContainer | None) -> None:
        process(tmp_path, 7, groups)
        assert owner_of(7, RUNNING, {UID}, tmp_path) == owner

    def test_a_process_that_went(self, tmp_path: Path) -> None:
        assert owner_of(7, RUNNING, {UID}, tmp_path) is None


def test_a_look_asks_every_card_and_leaves_out_those_that_do_not_answer(tmp_path: Path) -> None:
    process(tmp_path, 7, f"0::/kubepods/pod{UID}/{ID}\n")
    driver = FakeDriver(cards(2))
    driver.use("GPU-fake-0", GpuProcess(pid=7, memory=3000, cores=40), GpuProcess(pid=8, memory=1))
    assert look(driver, ["GPU-fake-0", "GPU-fake-1", "GPU-gone"], RUNNING, {UID}, tmp_path) == {
        "GPU-fake-0": [
            ProcessShare("GPU-fake-0", CardUsage(3000, 40), RunningContainer(UID, "main")),
            ProcessShare("GPU-fake-0", CardUsage(1, None)),
        ],
        "GPU-fake-1": [],
    }


MAIN, SIDE, NOBODY = RunningContainer("a", "main"), RunningContainer("a", "side"), None


class TestSums:
    @pytest.mark.parametrize(
        ("parts", "used"),
        [
            pytest.param([(100, 10), (50, 20)], CardUsage(150, 30), id="processes-add-up"),
            pytest.param([(100, 90), (50, 20)], CardUsage(150, 100), id="a-card-is-busy-once"),
            pytest.param(
                [(100, None), (None, 20)], CardUsage(None, None), id="what-is-not-known-makes-the-sum-unknown"
            ),
            pytest.param([(100, None)], CardUsage(100, None), id="memory-without-cores"),
            pytest.param([(0, 0)], CardUsage(0, 0), id="nothing-is-something-that-is-known"),
        ],
    )
    def test_of_one_container(self, parts: list[tuple[int | None, int | None]], used: CardUsage) -> None:
        assert usage(ProcessShare("GPU-0", CardUsage(*part), MAIN) for part in parts) == {
            "a": {"main": {"GPU-0": used}}
        }

    def test_by_pod_container_and_card(self) -> None:
        parts = [
            ProcessShare("GPU-0", CardUsage(1), MAIN),
            ProcessShare("GPU-1", CardUsage(2), MAIN),
            ProcessShare("GPU-0", CardUsage(4), SIDE),
            ProcessShare("GPU-0", CardUsage(8), RunningContainer("b")),
            ProcessShare("GPU-0", CardUsage(16), NOBODY),
        ]
        assert usage(parts) == {
            "a": {"main": {"GPU-0": CardUsage(1), "GPU-1": CardUsage(2)}, "side": {"GPU-0": CardUsage(4)}},
            "b": {"": {"GPU-0": CardUsage(8)}},
        }
        assert by_pod(parts) == {("a", "GPU-0"): 5, ("a", "GPU-1"): 2, ("b", "GPU-0"): 8}

    def test_of_a_pod_what_is_known_is_counted(self) -> None:
        assert by_pod([ProcessShare("GPU-0", CardUsage(100), MAIN), ProcessShare("GPU-0", CardUsage(), MAIN)]) == {
            ("a", "GPU-0"): 100
        }


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
        found = over_use((await node_pods(granted("a", tile(0)))).all(), used, 512)
        assert len(found) == count

    async def test_the_sentence_has_the_figures(self) -> None:
        (one,) = over_use((await node_pods(granted("a", tile(0)))).all(), {("a", "GPU-0"): 9000}, 512)
        assert one.sentence == "its processes use 9000 MiB of card GPU-0, of which it was granted 4096 MiB"
