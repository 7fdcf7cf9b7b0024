"""What containers use, for the Lease, for /metrics and for those who take too much; nothing that is old."""

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gputile.agent.metering import UsageMeter
from gputile.dialects.usage_annotation import ReportedUsage, read_usage
from gputile.kubelet.cri import RunningContainer
from gputile.model.usage import CardUsage
from gputile.nvml.driver import DriverGpu, GpuProcess
from gputile.nvml.fake import FakeDriver
from gputile.telemetry.exposition import AGENT_FAMILIES
from gputile.telemetry.hami_metrics import HAMI_AGENT_FAMILIES
from tests.agent.rig import CARDS, granted, tile
from tests.agent.test_process_usage import ID, UID, node_pods, process

GPUS = [DriverGpu(index=card.index, uuid=card.uuid, model=card.model, memory=card.memory) for card in CARDS[:2]]
RUNNING = {ID: RunningContainer(UID, "c0")}
LASTS = 9.0


class Bench:
    """A meter, its driver and a clock; the process 7 is of container c0 of a pod that was granted 4096 MiB."""

    def __init__(self, folder: Path, *, hami: bool = False) -> None:
        self.now, self.folder, self.hami = 100.0, folder, hami
        self.driver = FakeDriver(GPUS)
        process(folder, 7, f"0::/kubepods/pod{UID}/{ID}\n")

    async def look(self) -> UsageMeter:
        here = await node_pods(granted(UID, tile(0)))
        meter = UsageMeter(self.driver, here, lasts=LASTS, clock=lambda: self.now, hami=self.hami, proc=self.folder)
        await meter.look(CARDS[:2], RUNNING)
        return meter

    def use(self, *processes: GpuProcess) -> None:
        self.driver.use("GPU-0", *processes)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def samples(meter: UsageMeter) -> dict[tuple[str, ...], float]:
    """By name and the values of the labels."""
    families = text_string_to_metric_families(meter.page().decode())
    return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}


async def test_the_lease_says_who_uses_what_and_which_cards_answered(bench: Bench) -> None:
    bench.use(GpuProcess(pid=7, memory=3000, cores=40))
    said = read_usage((await bench.look()).said())
    assert said == ReportedUsage({UID: {"c0": {"GPU-0": CardUsage(3000, 40)}}}, frozenset({"GPU-0", "GPU-1"}))


async def test_a_look_that_is_too_old_says_nothing(bench: Bench) -> None:
    bench.use(GpuProcess(pid=7, memory=9000))
    meter = await bench.look()
    bench.now += LASTS
    assert meter.said()
    assert meter.over_use()
    bench.now += 0.1
    assert meter.said() == ""
    assert meter.over_use() == []
    assert samples(meter) == {}


async def test_a_driver_that_is_gone_leaves_nothing_known(bench: Bench) -> None:
    bench.use(GpuProcess(pid=7, memory=3000))
    meter = await bench.look()
    bench.driver.vanish()
    await meter.look(CARDS, RUNNING)
    assert meter.said() == ""


async def test_a_pod_hears_once_of_each_card(bench: Bench) -> None:
    bench.use(GpuProcess(pid=7, memory=9000))
    meter = await bench.look()
    assert [one.card for one in meter.untold(meter.over_use())] == ["GPU-0"]
    assert meter.untold(meter.over_use()) == []
    bench.driver.use("GPU-1", GpuProcess(pid=7, memory=1))
    await meter.look(CARDS[:2], RUNNING)
    assert [one.card for one in meter.untold(meter.over_use())] == ["GPU-1"]


async def test_figures_of_cards_and_containers(bench: Bench) -> None:
    bench.use(GpuProcess(pid=7, memory=3000, cores=40), GpuProcess(pid=8, memory=24, cores=10))
    found = samples(await bench.look())
    mine = ("default", UID, UID, "c0", "GPU-0")
    assert found == {
        ("gputile_agent_gpu_processes", "GPU-0", "0", "T4"): 2,
        ("gputile_agent_gpu_processes", "GPU-1", "1", "T4"): 0,
        ("gputile_agent_gpu_memory_used_bytes", "GPU-0", "0", "T4"): 3024 * 2**20,
        ("gputile_agent_gpu_memory_used_bytes", "GPU-1", "1", "T4"): 0,
        ("gputile_agent_gpu_cores_used_ratio", "GPU-0", "0", "T4"): 0.5,
        ("gputile_agent_gpu_cores_used_ratio", "GPU-1", "1", "T4"): 0,
        ("gputile_agent_container_memory_used_bytes", *mine): 3000 * 2**20,
        ("gputile_agent_container_cores_used_ratio", *mine): 0.4,
    }


async def test_what_is_not_known_is_absent_and_not_zero(bench: Bench) -> None:
    bench.use(GpuProcess(pid=7, memory=None, cores=None))
    bench.driver.put(GPUS[0])  # the other one does not answer
    found = samples(await bench.look())
    assert found == {("gputile_agent_gpu_processes", "GPU-0", "0", "T4"): 1}


async def test_hamis_names_and_units(tmp_path: Path) -> None:
    bench = Bench(tmp_path, hami=True)
    bench.use(GpuProcess(pid=7, memory=3000, cores=40))
    found = {key: value for key, value in samples(await bench.look()).items() if key[0].startswith("hami")}
    mine = ("vGPU", "default", UID, "c0", "0", "GPU-0")
    assert found == {
        ("hami_vgpu_memory_used_bytes", *mine): 3000 * 2**20,
        ("hami_vgpu_memory_limit_bytes", *mine): 4096 * 2**20,
        ("hami_container_device_memory_bytes", *mine): 3000 * 2**20,
        ("hami_container_device_utilization_ratio", *mine): 40,
    }


async def test_labels_are_as_the_families_say(tmp_path: Path) -> None:
    bench = Bench(tmp_path, hami=True)
    bench.use(GpuProcess(pid=7, memory=3000, cores=40))
    page = (await bench.look()).page().decode()
    declared = {family.name: family.labels for family in (*AGENT_FAMILIES, *HAMI_AGENT_FAMILIES)}
    seen = {one.name: tuple(one.labels) for family in text_string_to_metric_families(page) for one in family.samples}
    assert seen == declared
