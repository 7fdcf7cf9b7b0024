"""Which container a process belongs to, what processes add up to, and over-use."""

from pathlib import Path

import pytest

from gputile.agent.node_pods import NodePods
from gputile.agent.process_usage import ProcessShare, by_pod, over_use, owner_of, sample, usage
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
    node_pods = NodePods(DEFAULTS)
    await node_pods.set_cards(CARDS, "")
    await node_pods.listed(pods)
    return node_pods


def process(folder: Path, pid: int, cgroup: str) -> None:
    (folder / str(pid)).mkdir()
    (folder / str(pid) / "cgroup").write_text(cgroup)


class TestOwner:
    """The container of a process, by its cgroup."""

    @pytest.mark.parametrize(
        ("cgroup", "owner"),
        [
            pytest.param(f"4:memory:/kubepods/burstable/pod{UID}/{ID}\n", RunningContainer(UID, "main"), id="cgroupfs"),
            pytest.param(
                f"0::/kubepods.slice/{SYSTEMD}/cri-containerd-{ID}.scope\n", RunningContainer(UID, "main"), id="systemd"
            ),
            pytest.param(
                f"0::/../../{SYSTEMD}/crio-{ID}.scope\n",
                RunningContainer(UID, "main"),
                id="from-another-cgroup-namespace",
            ),
            pytest.param(
                f"4:memory:/k8s.io/{ID}\n", RunningContainer(UID, "main"), id="only-the-container-is-in-the-path"
            ),
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
                f"0::/kubepods/pod{UID}/{STRANGE}\n", RunningContainer(UID), id="a-container-that-is-not-listed-yet"
            ),
            pytest.param(f"0::/kubepods/pod{UID}\n", RunningContainer(UID), id="only-the-pod-is-in-the-path"),
            pytest.param(f"0::/kubepods/pod{OTHER}/{STRANGE}\n", None, id="an-unknown-pod"),
            pytest.param(f"0::/kubepods/pod{OTHER}/{ID}\n", None, id="runtime-and-cgroup-contradict-each-other"),
            pytest.param(f"0::/system.slice/docker-{STRANGE}.scope\n", None, id="a-container-of-another-runtime"),
            pytest.param("0::/user.slice/session-1.scope\n", None, id="a-login-session"),
            pytest.param("", None, id="an-empty-file"),
        ],
    )
    def test_by_cgroup(self, tmp_path: Path, cgroup: str, owner: RunningContainer | None) -> None:
        process(tmp_path, 7, cgroup)
        assert owner_of(7, RUNNING, {UID}, tmp_path) == owner

    def test_a_process_that_has_ended(self, tmp_path: Path) -> None:
        assert owner_of(7, RUNNING, {UID}, tmp_path) is None


def test_a_sample_has_every_gpu_that_answers(tmp_path: Path) -> None:
    process(tmp_path, 7, f"0::/kubepods/pod{UID}/{ID}\n")
    driver = FakeDriver(cards(2))
    driver.use("GPU-fake-0", GpuProcess(pid=7, memory=3000, cores=40), GpuProcess(pid=8, memory=1))
    assert sample(driver, ["GPU-fake-0", "GPU-fake-1", "GPU-gone"], RUNNING, {UID}, tmp_path) == {
        "GPU-fake-0": [
            ProcessShare("GPU-fake-0", CardUsage(3000, 40), RunningContainer(UID, "main")),
            ProcessShare("GPU-fake-0", CardUsage(1, None)),
        ],
        "GPU-fake-1": [],
    }


MAIN, SIDE, UNKNOWN = RunningContainer("a", "main"), RunningContainer("a", "side"), None


class TestSums:
    """The usage of processes, added up."""

    @pytest.mark.parametrize(
        ("parts", "used"),
        [
            pytest.param([(100, 10), (50, 20)], CardUsage(150, 30), id="processes-add-up"),
            pytest.param([(100, 90), (50, 20)], CardUsage(150, 100), id="at-most-the-whole-gpu"),
            pytest.param([(100, None), (None, 20)], CardUsage(None, None), id="an-unknown-part-makes-the-sum-unknown"),
            pytest.param([(100, None)], CardUsage(100, None), id="memory-without-cores"),
            pytest.param([(0, 0)], CardUsage(0, 0), id="zero-is-known"),
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
            ProcessShare("GPU-0", CardUsage(16), UNKNOWN),
        ]
        assert usage(parts) == {
            "a": {"main": {"GPU-0": CardUsage(1), "GPU-1": CardUsage(2)}, "side": {"GPU-0": CardUsage(4)}},
            "b": {"": {"GPU-0": CardUsage(8)}},
        }
        assert by_pod(parts) == {("a", "GPU-0"): 5, ("a", "GPU-1"): 2, ("b", "GPU-0"): 8}

    def test_the_known_memory_of_a_pod_is_counted(self) -> None:
        assert by_pod([ProcessShare("GPU-0", CardUsage(100), MAIN), ProcessShare("GPU-0", CardUsage(), MAIN)]) == {
            ("a", "GPU-0"): 100
        }


class TestOverUse:
    """Pods that use more than granted."""

    @pytest.mark.parametrize(
        ("used", "count"),
        [
            pytest.param({("a", "GPU-0"): 4096}, 0, id="as-granted"),
            pytest.param({("a", "GPU-0"): 4096 + 512}, 0, id="with-the-memory-of-the-driver"),
            pytest.param({("a", "GPU-0"): 4096 + 513}, 1, id="more-than-granted"),
            pytest.param({("a", "GPU-1"): 1}, 1, id="a-gpu-that-was-not-granted"),
            pytest.param({("stranger", "GPU-0"): 9999}, 0, id="an-unknown-pod"),
        ],
    )
    async def test_table(self, used: dict[tuple[str, str], int], count: int) -> None:
        overuses = over_use((await node_pods(granted("a", tile(0)))).all(), used, 512)
        assert len(overuses) == count

    async def test_the_message_has_the_numbers(self) -> None:
        (overuse,) = over_use((await node_pods(granted("a", tile(0)))).all(), {("a", "GPU-0"): 9000}, 512)
        assert overuse.message == "the pod uses 9000 MiB of GPU GPU-0 and was granted 4096 MiB of it"
