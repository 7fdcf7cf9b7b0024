"""What containers use, for the Lease, for /metrics and for over-use Events; no sample that is too old."""

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
MAX_AGE = 9.0


class Bench:
    """A meter, its driver and a clock; process 7 belongs to container c0 of a pod with a grant of 4096 MiB."""

    def __init__(self, folder: Path, *, hami: bool = False) -> None:
        self.now, self.folder, self.hami = 100.0, folder, hami
        self.driver = FakeDriver(GPUS)
        process(folder, 7, f"0::/kubepods/pod{UID}/{ID}\n")

    async def sample(self) -> UsageMeter:
        pods = await node_pods(granted(UID, tile(0)))
        meter = UsageMeter(self.driver, pods, max_age=MAX_AGE, clock=lambda: self.now, hami=self.hami, proc=self.folder)
        await meter.sample(CARDS[:2], RUNNING)
        return meter

    def use(self, *processes: GpuProcess) -> None:
        self.driver.use("GPU-0", *processes)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def samples(meter: UsageMeter) -> dict[tuple[str, ...], float]:
    """By name and the values of the labels."""
    families = text_string_to_metric_families(meter.page().decode())
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


async def test_the_lease_has_the_usage_and_the_gpus_that_answered(bench: Bench) -> None:
    bench.use(GpuProcess(pid=7, memory=3000, cores=40))
    usage = read_usage((await bench.sample()).usage_annotation())
    assert usage == ReportedUsage({UID: {"c0": {"GPU-0": CardUsage(3000, 40)}}}, frozenset({"GPU-0", "GPU-1"}))


async def test_a_sample_that_is_too_old_is_ignored(bench: Bench) -> None:
    bench.use(GpuProcess(pid=7, memory=9000))
    meter = await bench.sample()
    bench.now += MAX_AGE
    assert meter.usage_annotation()
    assert meter.over_use()
    bench.now += 0.1
    assert meter.usage_annotation() == ""
    assert meter.over_use() == []
    assert samples(meter) == {}


async def test_without_a_driver_usage_is_unknown(bench: Bench) -> None:
    bench.use(GpuProcess(pid=7, memory=3000))
    meter = await bench.sample()
    bench.driver.vanish()
    await meter.sample(CARDS, RUNNING)
    assert meter.usage_annotation() == ""


async def test_over_use_is_reported_once_per_gpu(bench: Bench) -> None:
    bench.use(GpuProcess(pid=7, memory=9000))
    meter = await bench.sample()
    assert [overuse.card for overuse in meter.unreported(meter.over_use())] == ["GPU-0"]
    assert meter.unreported(meter.over_use()) == []
    bench.driver.use("GPU-1", GpuProcess(pid=7, memory=1))
    await meter.sample(CARDS[:2], RUNNING)
    assert [overuse.card for overuse in meter.unreported(meter.over_use())] == ["GPU-1"]


async def test_metrics_of_gpus_and_containers(bench: Bench) -> None:
    bench.use(GpuProcess(pid=7, memory=3000, cores=40), GpuProcess(pid=8, memory=24, cores=10))
    values = samples(await bench.sample())
    labels = ("default", UID, UID, "c0", "GPU-0")
    assert values == {
        ("gputile_agent_gpu_processes", "GPU-0", "0", "T4"): 2,
        ("gputile_agent_gpu_processes", "GPU-1", "1", "T4"): 0,
        ("gputile_agent_gpu_memory_used_bytes", "GPU-0", "0", "T4"): 3024 * 2**20,
        ("gputile_agent_gpu_memory_used_bytes", "GPU-1", "1", "T4"): 0,
        ("gputile_agent_gpu_cores_used_ratio", "GPU-0", "0", "T4"): 0.5,
        ("gputile_agent_gpu_cores_used_ratio", "GPU-1", "1", "T4"): 0,
        ("gputile_agent_container_memory_used_bytes", *labels): 3000 * 2**20,
        ("gputile_agent_container_cores_used_ratio", *labels): 0.4,
    }


async def test_unknown_usage_is_absent_and_not_zero(bench: Bench) -> None:
    bench.use(GpuProcess(pid=7, memory=None, cores=None))
    bench.driver.put(GPUS[0])  # the other GPU does not answer
    values = samples(await bench.sample())
    assert values == {("gputile_agent_gpu_processes", "GPU-0", "0", "T4"): 1}


async def test_hamis_names_and_units(tmp_path: Path) -> None:
    bench = Bench(tmp_path, hami=True)
    bench.use(GpuProcess(pid=7, memory=3000, cores=40))
    values = {key: value for key, value in samples(await bench.sample()).items() if key[0].startswith("hami")}
    labels = ("vGPU", "default", UID, "c0", "0", "GPU-0")
    assert values == {
        ("hami_vgpu_memory_used_bytes", *labels): 3000 * 2**20,
        ("hami_vgpu_memory_limit_bytes", *labels): 4096 * 2**20,
        ("hami_container_device_memory_bytes", *labels): 3000 * 2**20,
        ("hami_container_device_utilization_ratio", *labels): 40,
    }


async def test_labels_are_those_of_the_families(tmp_path: Path) -> None:
    bench = Bench(tmp_path, hami=True)
    bench.use(GpuProcess(pid=7, memory=3000, cores=40))
    page = (await bench.sample()).page().decode()
    declared = {family.name: family.labels for family in (*AGENT_FAMILIES, *HAMI_AGENT_FAMILIES)}
    families = text_string_to_metric_families(page)
    actual = {sample.name: tuple(sample.labels) for family in families for sample in family.samples}
    assert actual == declared
