"""The agent put together, on a scripted kubelet, a fake driver and a node in memory."""

import asyncio
import json
import threading
from pathlib import Path

import pytest

from gputile.agent import app
from gputile.agent.plugin_manager import cancelled
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


async def test_a_container_starts_with_its_card(tmp_path: Path) -> None:
    async with running(tmp_path, *GPUS) as (rig, kubelet):
        await rig.until(lambda: kubelet.registrations)
        rig.api.pods.put_nowait(Change("ADDED", granted("a", tile(2))))
        given = await kubelet.call(
            "Allocate", wire.AllocateRequest(containers=[wire.DeviceIds(ids=["GPU-0::0"])]), wire.AllocateResponse
        )
        Kubelet(tmp_path).gave("a", "c0", ["GPU-0::0"], given.containers[0])
        await kubelet.call("PreStartContainer", wire.DeviceIds(ids=["GPU-0::0"]), wire.Empty)
        (spec,) = (tmp_path / "cdi").glob("gputile.io-slot_a_*.json")
        assert "NVIDIA_VISIBLE_DEVICES=GPU-2" in spec.read_text()


async def test_a_card_that_fails_leaves_and_comes_back(tmp_path: Path) -> None:
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


async def test_a_cordoned_card_leaves_the_kubelet(tmp_path: Path) -> None:
    async with running(tmp_path, *GPUS) as (rig, kubelet):
        await rig.until(lambda: kubelet.registrations and rig.api.inventory())
        watch = kubelet.watch()
        first = await anext(watch)
        assert all(device.health == "Healthy" for device in first.devices)
        rig.api.annotate(**{gputile.CORDON: "GPU-1"})
        second = await anext(watch)
        assert {device.id[:5] for device in second.devices if device.health != "Healthy"} == {"GPU-1"}
        await watch.aclose()  # type: ignore[attr-defined]


async def test_a_node_without_a_driver_stays_healthy_and_looks_again(tmp_path: Path) -> None:
    async with running(tmp_path) as (rig, kubelet):
        await rig.until(lambda: rig.agent.why_not_ready() == "" and rig.api.writes)
        assert rig.api.inventory() == []
        assert kubelet.registrations == []
        rig.driver.put(*GPUS)
        await rig.until(lambda: kubelet.registrations and rig.api.inventory())


async def test_since_is_written_once_and_kept_over_restarts_and_a_driver_that_is_gone(tmp_path: Path) -> None:
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


async def test_a_name_that_another_plugin_serves_is_left_to_it(tmp_path: Path) -> None:
    said = {"Data": {"RegisteredDevices": {"gputile.io/gpu": ["theirs-0"]}}, "Checksum": 1}
    (tmp_path / CHECKPOINT).write_text(json.dumps(said))
    async with running(tmp_path, *GPUS, offered={"gputile.io/gpu": "8"}) as (rig, kubelet):
        await rig.until(lambda: rig.api.inventory() and rig.api.beats)
        assert kubelet.registrations == []
        rig.api.node["status"]["allocatable"]["gputile.io/gpu"] = "0"
        rig.api.annotate(touched="1")
        await rig.until(lambda: kubelet.registrations)


@pytest.mark.parametrize(
    ("known", "stolen"),
    [
        pytest.param(["GPU-0::0", "GPU-3::9"], 0, id="ours"),
        pytest.param(["GPU-0::0", "theirs-0"], 1, id="theirs"),
        pytest.param(["GPU-9::0"], 0, id="of-a-card-that-is-no-longer-here"),
    ],
)
async def test_a_plugin_that_takes_our_name_over_is_noticed(tmp_path: Path, known: list[str], stolen: int) -> None:
    removed = DriverGpu(index=4, uuid="GPU-9", model="T4", memory=16384, minor=4)
    async with running(tmp_path, *GPUS, removed) as (rig, kubelet):
        await rig.until(lambda: kubelet.registrations and len(rig.api.inventory()) == 5)
        await anext(kubelet.watch())
        rig.driver.put(*GPUS)
        await rig.until(lambda: len(rig.api.inventory()) == 4)
        said = {"Data": {"RegisteredDevices": {"gputile.io/gpu": known}}, "Checksum": 1}
        (tmp_path / CHECKPOINT).write_text(json.dumps(said))
        rig.agent.tidy()
        told = f'gputile_agent_inconsistencies{{kind="stolen-name"}} {float(stolen)}'
        assert told in rig.agent.metrics.text().decode()


async def test_a_number_that_the_kubelet_drops_is_restored(tmp_path: Path) -> None:
    async with running(tmp_path, *GPUS) as (rig, _):
        await rig.until(lambda: rig.api.node["status"].get("allocatable"))
        rig.api.node["status"]["allocatable"]["gputile.io/memory"] = "0"
        rig.api.annotate(touched="1")
        await rig.until(lambda: rig.api.node["status"]["allocatable"]["gputile.io/memory"] == "65536")


async def test_the_heartbeat_says_what_containers_use(tmp_path: Path) -> None:
    socket = tmp_path / "cri.sock"
    said_to_run = ListedContainer(id="c" * 64, state=RUNNING, labels={UID_LABEL: UID, NAME: "c0"})
    async with (
        runtime(socket, said_to_run),
        running(tmp_path, *GPUS, report_use=True, runtime=str(socket)) as (rig, _),
    ):
        rig.agent.meter._proc = tmp_path
        (tmp_path / "7").mkdir()
        (tmp_path / "7" / "cgroup").write_text(f"0::/kubepods/pod{UID}/{'c' * 64}\n")
        rig.api.pods.put_nowait(Change("ADDED", granted(UID, tile(0, memory=4096))))
        rig.driver.use("GPU-0", GpuProcess(pid=7, memory=3000, cores=40))
        await rig.until(lambda: rig.api.uses and '"c0":[3000,40]' in rig.api.uses[-1])
        said = read_usage(rig.api.uses[-1])
        assert said is not None
        assert said.pods == {UID: {"c0": {"GPU-0": CardUsage(3000, 40)}}}
        assert said.cards == {gpu.uuid for gpu in GPUS}
        text = rig.agent.metrics.text().decode()
        assert f'gputile_agent_container_memory_used_bytes{{namespace="default",pod="{UID}",' in text
        assert rig.api.notes == []
        rig.driver.use("GPU-0", GpuProcess(pid=7, memory=5000))
        await rig.until(lambda: rig.api.notes)
        rig.driver.vanish()
        await rig.until(lambda: rig.api.uses[-1] == "")
    assert [(note.reason, note.uid) for note in rig.api.notes] == [("GPUOverUse", UID)]


async def test_it_says_nothing_of_use_unless_it_is_told_to(tmp_path: Path) -> None:
    async with running(tmp_path, *GPUS) as (rig, _):
        rig.driver.use("GPU-0", GpuProcess(pid=7, memory=3000))
        await rig.until(lambda: len(rig.api.uses) > 5)
        assert set(rig.api.uses) == {""}
        assert "gputile_agent_container_memory_used_bytes" not in rig.agent.metrics.text().decode()


# ---- what goes wrong ------------------------------------------------------------------------------------------------


async def test_an_agent_that_does_not_hear_of_its_pods_is_silent(tmp_path: Path) -> None:
    """Else the scheduler would take its silence about a pod for a word that its containers are gone."""
    async with running(tmp_path, *GPUS) as (rig, _):
        await rig.until(lambda: rig.api.beats)
        early = failed_beats(rig)  # before the node was first seen there was nothing to say
        rig.api.pods.put_nowait(WatchFailed("403: forbidden"))
        await rig.until(lambda: failed_beats(rig) > early)
        before = len(rig.api.beats)
        await asyncio.sleep(0.05)
        assert len(rig.api.beats) == before
        rig.api.pods.put_nowait(Bookmark())
        await rig.until(lambda: len(rig.api.beats) > before)


def failed_beats(rig: Rig) -> float:
    return rig.agent.metrics.registry.get_sample_value("gputile_agent_heartbeats_total", {"outcome": "failed"}) or 0.0


async def test_pods_on_a_card_that_the_driver_lost_are_told_once(tmp_path: Path) -> None:
    async with running(tmp_path, *GPUS) as (rig, _):
        rig.api.pods.put_nowait(Change("ADDED", granted("a", tile(2))))
        await rig.until(lambda: rig.agent.node_pods.get("a") and rig.api.inventory())
        rig.driver.fail("GPU-2")
        await rig.until(lambda: rig.api.notes)
        before = len(rig.api.beats)
        await rig.until(lambda: len(rig.api.beats) > before + 10)
        assert [(note.pod, note.reason) for note in rig.api.notes] == [("a", "GPUUnhealthy")]


async def test_a_mark_of_the_agent_before_us_still_counts(tmp_path: Path) -> None:
    cards = [{"index": 1, "uuid": "GPU-1", "memory": 16384, "healthy": False, "reason": "XID 74: NVLink error"}]
    said = json.dumps({"version": 1, "cards": cards})
    rig = Rig(tmp_path, FakeDriver(GPUS))
    rig.api.node["metadata"]["annotations"][gputile.INVENTORY] = said
    await rig.agent._nodes_listed((rig.api._object(),))
    await rig.agent.look()
    assert [card.reason for card in rig.agent.cards.now() if not card.healthy] == ["XID 74: NVLink error"]


async def test_a_driver_that_hangs_takes_the_cards_out_of_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "HANGS", 0.05)
    rig, hang = Rig(tmp_path, FakeDriver(GPUS)), threading.Event()
    await rig.agent.look()
    calm = rig.driver.look
    asked: list[int] = []

    def look() -> DriverSnapshot:
        asked.append(1)
        hang.wait(5)
        return calm()

    rig.driver.look = look  # type: ignore[method-assign]
    await rig.agent.look()
    await rig.agent.look()
    assert {card.reason for card in rig.agent.cards.now()} == {"the driver has not answered for 0.05 seconds"}
    assert len(asked) == 1  # no second question before it has answered the first
    hang.set()
    await rig.agent.look()
    assert all(card.healthy for card in rig.agent.cards.now())
    await cancelled(rig.agent.plugin_manager.tasks())


async def test_the_last_word_on_the_lease_is_the_withdrawal(tmp_path: Path) -> None:
    async with running(tmp_path, *GPUS) as (rig, _):
        await rig.until(lambda: rig.api.beats)
        rig.api.refusals = 1  # a heartbeat was on its way
    assert rig.api.beats[-1] == "withdrawn"


async def test_an_edited_grant_stays_the_first_one_when_cards_change(tmp_path: Path) -> None:
    rig = Rig(tmp_path, FakeDriver(GPUS))
    await rig.agent.node_pods.serves(CARDS, "")
    await rig.agent.node_pods.listed([granted("a", tile(0))])
    await rig.agent.node_pods.changed(granted("a", tile(3)), deleted=False)
    await rig.agent.node_pods.serves(CARDS[:3], "")
    one = rig.agent.node_pods.get("a")
    assert one
    assert one.grant
    assert (set(one.grant.uses()), bool(one.fault)) == ({"GPU-0"}, True)
