"""The whole agent, with a scripted kubelet, a fake driver and a node in memory."""

import asyncio
import json
import threading
from pathlib import Path

import pytest

from gputile.agent import app
from gputile.concurrency.tasks import cancel_all
from gputile.dialects import gputile, registry
from gputile.dialects.usage_annotation import read_usage
from gputile.kube.api import Bookmark, Change, WatchFailed
from gputile.kubelet import messages as wire
from gputile.kubelet.checkpoint import CHECKPOINT
from gputile.kubelet.cri import NAME, RUNNING
from gputile.kubelet.cri import UID as UID_LABEL
from gputile.kubelet.messages import ListedContainer
from gputile.model.usage import CardUsage
from gputile.nvml.driver import DriverGpu, DriverSnapshot, GpuProcess
from gputile.nvml.fake import FakeDriver
from tests.agent.node import GPUS, UID, Rig, running
from tests.agent.rig import CARDS, Kubelet, granted, tile
from tests.kubelet.runtime import runtime


async def test_it_publishes_registers_and_withdraws(tmp_path: Path) -> None:
    async with running(tmp_path, *GPUS) as (rig, kubelet):
        await rig.until(lambda: rig.api.inventory() and kubelet.registrations and rig.api.beats)
        assert [card["uuid"] for card in rig.api.inventory()] == ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]
        node = registry.read_node(rig.api.node)
        assert getattr(node, "agent", "") == "gputile"
        await rig.until(lambda: rig.api.node["status"]["allocatable"])
        assert rig.api.node["status"]["allocatable"] == {"gputile.io/memory": "65536", "gputile.io/cores": "400"}
        assert rig.api.node["metadata"]["labels"]["gputile.io/gpu-model"] == "T4"
        assert rig.agent.why_not_ready() == ""
    assert rig.api.beats[-1] == "withdrawn"


async def test_nothing_is_written_twice(tmp_path: Path) -> None:
    async with running(tmp_path, *GPUS) as (rig, _):
        await rig.until(lambda: len(rig.api.writes) >= 2)
        before = len(rig.api.beats)
        await rig.until(lambda: len(rig.api.beats) > before + 20)
        assert len(rig.api.writes) == 2


async def test_a_container_starts_with_the_gpu_of_its_grant(tmp_path: Path) -> None:
    async with running(tmp_path, *GPUS) as (rig, kubelet):
        await rig.until(lambda: kubelet.registrations)
        rig.api.pods.put_nowait(Change("ADDED", granted("a", tile(2))))
        response = await kubelet.call(
            "Allocate", wire.AllocateRequest(containers=[wire.DeviceIds(ids=["GPU-0::0"])]), wire.AllocateResponse
        )
        Kubelet(tmp_path).record("a", "c0", ["GPU-0::0"], response.containers[0])
        await kubelet.call("PreStartContainer", wire.DeviceIds(ids=["GPU-0::0"]), wire.Empty)
        (spec,) = (tmp_path / "cdi").glob("gputile.io-slot_a_*.json")
        assert "NVIDIA_VISIBLE_DEVICES=GPU-2" in spec.read_text()


async def test_a_failed_gpu_is_unhealthy_until_its_probation_is_over(tmp_path: Path) -> None:
    async with running(tmp_path, *GPUS) as (rig, _):
        await rig.until(lambda: rig.api.inventory())
        rig.api.pods.put_nowait(Change("ADDED", granted("a", tile(2))))
        await rig.until(lambda: rig.agent.node_pods.get("a"))
        rig.driver.report(79, "GPU-2")
        await rig.until(lambda: not all(card.get("healthy", True) for card in rig.api.inventory()))
        assert [card["index"] for card in rig.api.inventory() if not card.get("healthy", True)] == [2]
        assert rig.api.inventory()[2]["reason"] == "XID 79: fallen off the bus"
        await rig.until(lambda: rig.api.notes)
        assert (rig.api.notes[0].pod, rig.api.notes[0].reason) == ("a", "GPUUnhealthy")
        await rig.until(lambda: all(card.get("healthy", True) for card in rig.api.inventory()))


async def test_a_cordoned_gpu_is_unhealthy_for_the_kubelet(tmp_path: Path) -> None:
    async with running(tmp_path, *GPUS) as (rig, kubelet):
        await rig.until(lambda: kubelet.registrations and rig.api.inventory())
        watch = kubelet.watch()
        first = await anext(watch)
        assert all(device.health == "Healthy" for device in first.devices)
        rig.api.annotate(**{gputile.CORDON: "GPU-1"})
        second = await anext(watch)
        assert {device.id[:5] for device in second.devices if device.health != "Healthy"} == {"GPU-1"}
        await watch.aclose()  # type: ignore[attr-defined]


async def test_without_a_driver_the_agent_is_ready_and_polls_again(tmp_path: Path) -> None:
    async with running(tmp_path) as (rig, kubelet):
        await rig.until(lambda: rig.agent.why_not_ready() == "" and rig.api.writes)
        assert rig.api.inventory() == []
        assert kubelet.registrations == []
        rig.driver.put(*GPUS)
        await rig.until(lambda: kubelet.registrations and rig.api.inventory())


async def test_since_is_written_once_and_survives_restarts_and_a_missing_driver(tmp_path: Path) -> None:
    async with running(tmp_path, *GPUS) as (rig, _):
        await rig.until(lambda: rig.api.inventory())
        first = since_of(rig)
        assert first
    before = json.dumps({"version": 1, "cards": [], "since": "2026-01-01T00:00:00Z"})
    async with running(tmp_path, inventory=before) as (rig, _):
        await rig.until(lambda: rig.agent.why_not_ready() == "" and rig.api.writes)
        assert since_of(rig) == "2026-01-01T00:00:00Z"
        rig.driver.put(*GPUS)
        await rig.until(lambda: rig.api.inventory())
        assert since_of(rig) == "2026-01-01T00:00:00Z"


def since_of(rig: "Rig") -> str:
    return str(json.loads(rig.api.node["metadata"]["annotations"][gputile.INVENTORY]).get("since", ""))


async def test_a_resource_that_another_plugin_serves_is_not_registered(tmp_path: Path) -> None:
    checkpoint = {"Data": {"RegisteredDevices": {"gputile.io/gpu": ["theirs-0"]}}, "Checksum": 1}
    (tmp_path / CHECKPOINT).write_text(json.dumps(checkpoint))
    async with running(tmp_path, *GPUS, offered={"gputile.io/gpu": "8"}) as (rig, kubelet):
        await rig.until(lambda: rig.api.inventory() and rig.api.beats)
        assert kubelet.registrations == []
        rig.api.node["status"]["allocatable"]["gputile.io/gpu"] = "0"
        rig.api.annotate(touched="1")
        await rig.until(lambda: kubelet.registrations)


@pytest.mark.parametrize(
    ("registered", "stolen"),
    [
        pytest.param(["GPU-0::0", "GPU-3::9"], 0, id="only-our-devices"),
        pytest.param(["GPU-0::0", "theirs-0"], 1, id="devices-of-another-plugin"),
        pytest.param(["GPU-9::0"], 0, id="devices-of-a-removed-gpu"),
    ],
)
async def test_another_plugin_that_registers_our_resource_is_noticed(
    tmp_path: Path, registered: list[str], stolen: int
) -> None:
    removed = DriverGpu(index=4, uuid="GPU-9", model="T4", memory=16384, minor=4)
    async with running(tmp_path, *GPUS, removed) as (rig, kubelet):
        await rig.until(lambda: kubelet.registrations and len(rig.api.inventory()) == 5)
        await anext(kubelet.watch())
        rig.driver.put(*GPUS)
        await rig.until(lambda: len(rig.api.inventory()) == 4)
        checkpoint = {"Data": {"RegisteredDevices": {"gputile.io/gpu": registered}}, "Checksum": 1}
        (tmp_path / CHECKPOINT).write_text(json.dumps(checkpoint))
        rig.agent.clean_up()
        line = f'gputile_agent_inconsistencies{{kind="stolen-name"}} {float(stolen)}'
        assert line in rig.agent.metrics_page().decode()


async def test_a_resource_that_the_kubelet_drops_is_restored(tmp_path: Path) -> None:
    async with running(tmp_path, *GPUS) as (rig, _):
        await rig.until(lambda: rig.api.node["status"].get("allocatable"))
        rig.api.node["status"]["allocatable"]["gputile.io/memory"] = "0"
        rig.api.annotate(touched="1")
        await rig.until(lambda: rig.api.node["status"]["allocatable"]["gputile.io/memory"] == "65536")


async def test_the_heartbeat_has_what_containers_use(tmp_path: Path) -> None:
    socket = tmp_path / "cri.sock"
    container = ListedContainer(id="c" * 64, state=RUNNING, labels={UID_LABEL: UID, NAME: "c0"})
    async with (
        runtime(socket, container),
        running(tmp_path, *GPUS, report_use=True, runtime=str(socket)) as (rig, _),
    ):
        rig.agent.meter._proc = tmp_path
        (tmp_path / "7").mkdir()
        (tmp_path / "7" / "cgroup").write_text(f"0::/kubepods/pod{UID}/{'c' * 64}\n")
        rig.api.pods.put_nowait(Change("ADDED", granted(UID, tile(0, memory=4096))))
        rig.driver.use("GPU-0", GpuProcess(pid=7, memory=3000, cores=40))
        await rig.until(lambda: rig.api.uses and '"c0":[3000,40]' in rig.api.uses[-1])
        usage = read_usage(rig.api.uses[-1])
        assert usage is not None
        assert usage.pods == {UID: {"c0": {"GPU-0": CardUsage(3000, 40)}}}
        assert usage.cards == {gpu.uuid for gpu in GPUS}
        text = rig.agent.metrics_page().decode()
        assert f'gputile_agent_container_memory_used_bytes{{namespace="default",pod="{UID}",' in text
        assert rig.api.notes == []
        rig.driver.use("GPU-0", GpuProcess(pid=7, memory=5000))
        await rig.until(lambda: rig.api.notes)
        rig.driver.vanish()
        await rig.until(lambda: rig.api.uses[-1] == "")
    assert [(note.reason, note.uid) for note in rig.api.notes] == [("GPUOverUse", UID)]


async def test_usage_is_not_reported_by_default(tmp_path: Path) -> None:
    async with running(tmp_path, *GPUS) as (rig, _):
        rig.driver.use("GPU-0", GpuProcess(pid=7, memory=3000))
        await rig.until(lambda: len(rig.api.uses) > 5)
        assert set(rig.api.uses) == {""}
        assert "gputile_agent_container_memory_used_bytes" not in rig.agent.metrics_page().decode()


# ---- failures -------------------------------------------------------------------------------------------------------


async def test_without_its_watch_on_pods_the_agent_sends_no_heartbeat(tmp_path: Path) -> None:
    """Otherwise the scheduler would conclude that an orphaned pod's containers are gone."""
    async with running(tmp_path, *GPUS) as (rig, _):
        await rig.until(lambda: rig.api.beats)
        early = failed_beats(rig)  # before the first report there is no heartbeat
        rig.api.pods.put_nowait(WatchFailed("403: forbidden"))
        await rig.until(lambda: failed_beats(rig) > early)
        before = len(rig.api.beats)
        await asyncio.sleep(0.05)
        assert len(rig.api.beats) == before
        rig.api.pods.put_nowait(Bookmark())
        await rig.until(lambda: len(rig.api.beats) > before)


def failed_beats(rig: Rig) -> float:
    return rig.agent.metrics.registry.get_sample_value("gputile_agent_heartbeats_total", {"outcome": "failed"}) or 0.0


async def test_pods_on_a_gpu_that_the_driver_lost_get_one_event(tmp_path: Path) -> None:
    async with running(tmp_path, *GPUS) as (rig, _):
        rig.api.pods.put_nowait(Change("ADDED", granted("a", tile(2))))
        await rig.until(lambda: rig.agent.node_pods.get("a") and rig.api.inventory())
        rig.driver.fail("GPU-2")
        await rig.until(lambda: rig.api.notes)
        before = len(rig.api.beats)
        await rig.until(lambda: len(rig.api.beats) > before + 10)
        assert [(note.pod, note.reason) for note in rig.api.notes] == [("a", "GPUUnhealthy")]


async def test_a_mark_of_an_earlier_agent_still_counts(tmp_path: Path) -> None:
    cards = [{"index": 1, "uuid": "GPU-1", "memory": 16384, "healthy": False, "reason": "XID 74: NVLink error"}]
    inventory = json.dumps({"version": 1, "cards": cards})
    rig = Rig(tmp_path, FakeDriver(GPUS))
    rig.api.node["metadata"]["annotations"][gputile.INVENTORY] = inventory
    await rig.agent._nodes_listed((rig.api._object(),))
    await rig.agent.poll_driver()
    assert [card.reason for card in rig.agent.cards.current() if not card.healthy] == ["XID 74: NVLink error"]


async def test_the_gpus_of_a_driver_that_hangs_are_unhealthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "DRIVER_TIMEOUT", 0.05)
    rig, hang = Rig(tmp_path, FakeDriver(GPUS)), threading.Event()
    await rig.agent.poll_driver()
    original = rig.driver.snapshot
    calls: list[int] = []

    def snapshot() -> DriverSnapshot:
        calls.append(1)
        hang.wait(5)
        return original()

    rig.driver.snapshot = snapshot  # type: ignore[method-assign]
    await rig.agent.poll_driver()
    await rig.agent.poll_driver()
    assert {card.reason for card in rig.agent.cards.current()} == {"the driver has not answered for 0.05 seconds"}
    assert len(calls) == 1  # no second query before the first is answered
    hang.set()
    await rig.agent.poll_driver()
    assert all(card.healthy for card in rig.agent.cards.current())
    await cancel_all(rig.agent.plugin_manager.tasks())


async def test_the_last_write_to_the_lease_is_the_withdrawal(tmp_path: Path) -> None:
    async with running(tmp_path, *GPUS) as (rig, _):
        await rig.until(lambda: rig.api.beats)
        rig.api.conflicts = 1  # a heartbeat was under way
    assert rig.api.beats[-1] == "withdrawn"


async def test_the_first_grant_still_counts_when_the_cards_change(tmp_path: Path) -> None:
    rig = Rig(tmp_path, FakeDriver(GPUS))
    await rig.agent.node_pods.set_cards(CARDS, "")
    await rig.agent.node_pods.listed([granted("a", tile(0))])
    await rig.agent.node_pods.changed(granted("a", tile(3)), deleted=False)
    await rig.agent.node_pods.set_cards(CARDS[:3], "")
    node_pod = rig.agent.node_pods.get("a")
    assert node_pod
    assert node_pod.grant
    assert (set(node_pod.grant.uses()), bool(node_pod.fault)) == ({"GPU-0"}, True)
