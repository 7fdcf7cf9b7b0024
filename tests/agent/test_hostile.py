"""Hostile pods and unexpected errors: the agent keeps running, renews its Lease, and starts other pods' containers.

Seen to fail, by breaking the code on purpose: `_isolate` that raises; `NodePods._parse_safely` that raises; a loop
without `_isolate`; `CdiSpecStore` that writes by path, or without O_EXCL; an edited grant that changes the order.
"""

import asyncio
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gputile.agent import app
from gputile.agent.cdi_specs import CdiSpecStore
from gputile.agent.isolation import STRENGTH, IsolationUnavailable, choose
from gputile.agent.node_pods import NodePods
from gputile.agent.settings import ISOLATIONS, AgentSettings
from gputile.dialects import gputile, records
from gputile.dialects.kube_objects import Pod
from gputile.dialects.settings import DEFAULTS
from gputile.kube.api import Change, Snapshot
from gputile.kubelet import messages as wire
from gputile.kubelet.cri import SocketReplaced
from gputile.testing.builders import pod as manifest
from tests.agent.node import GPUS, Rig, running
from tests.agent.rig import CARDS, NODE, Kubelet, granted, several, tile
from tests.kubelet.kubelet import ScriptedKubelet

GPU = {gputile.GPU: 1, gputile.MEMORY: 4096}
DEEP = "[" * 50_000


def hostile(uid: str, *containers: dict[str, Any], init: int = 0, annotations: dict[str, str] | None = None) -> Pod:
    inits = tuple(GPU for _ in range(init))
    pod = manifest(*(containers or (GPU,)), init=inits, name=uid, uid=uid, on=NODE, annotations=annotations)
    return msgspec.convert(pod, Pod)


def forged(uid: str, *tiles: dict[str, Any], **changed: Any) -> Pod:
    containers = [{"name": "c0", "tiles": list(tiles)}]
    record = {"version": 1, "pod": uid, "node": NODE, "dialect": "gputile", "containers": containers, "at": 1}
    return hostile(uid, annotations={gputile.GRANT: json.dumps(record | changed)})


TILE = {"uuid": "GPU-0", "index": 0, "memory": 1024, "cores": 0}
PODS = [
    pytest.param(hostile("x", annotations={f"gputile.io/a{n}": "" for n in range(17_000)}), id="17000-annotations"),
    pytest.param(hostile("x", annotations={gputile.GRANT: DEEP}), id="a-grant-of-deep-json"),
    pytest.param(hostile("x", annotations={gputile.GRANT: "x" * 200_000}), id="a-grant-that-is-not-json"),
    pytest.param(hostile("x", annotations={"gputile.io/uuid": "a," * 45_000}), id="a-list-of-45000-uuids"),
    pytest.param(hostile("x", init=2000), id="2000-init-containers"),
    pytest.param(hostile("x", *(GPU for _ in range(2000))), id="2000-containers"),
    pytest.param(forged("x", *[TILE] * 4000), id="a-grant-of-4000-tiles"),
    pytest.param(forged("x", TILE, at=-(10**25)), id="a-grant-with-a-negative-time"),
    pytest.param(forged("x", TILE | {"memory": 10**30}), id="a-tile-of-1e30-mib"),
]


@pytest.mark.parametrize("evil", PODS)
async def test_beside_a_hostile_pod_others_start_and_the_lease_is_renewed(tmp_path: Path, evil: Pod) -> None:
    async with running(tmp_path, *GPUS) as (rig, kubelet):
        await rig.until(lambda: kubelet.registrations and rig.api.beats)
        rig.api.pods.put_nowait(Change("ADDED", evil))
        await a_good_pod_starts(rig, kubelet, tmp_path)


async def a_good_pod_starts(rig: Rig, kubelet: ScriptedKubelet, folder: Path) -> None:
    rig.api.pods.put_nowait(Change("ADDED", granted("good", tile(2), at=5)))
    request = wire.AllocateRequest(containers=[wire.DeviceIds(ids=["GPU-0::0"])])
    response = await kubelet.call("Allocate", request, wire.AllocateResponse)
    Kubelet(folder).record("good", "c0", ["GPU-0::0"], response.containers[0])
    await kubelet.call("PreStartContainer", wire.DeviceIds(ids=["GPU-0::0"]), wire.Empty)
    (spec,) = (folder / "cdi").glob("gputile.io-slot_good_*.json")
    assert "NVIDIA_VISIBLE_DEVICES=GPU-2" in spec.read_text()
    before = len(rig.api.beats)
    await rig.until(lambda: len(rig.api.beats) > before)


async def test_a_pod_that_fails_the_parser_affects_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = records.read_grant

    def read_grant(pod: Pod, *more: Any) -> Any:
        if pod.uid == "x":
            raise OverflowError("unexpected")
        return original(pod, *more)

    monkeypatch.setattr(records, "read_grant", read_grant)
    async with running(tmp_path, *GPUS) as (rig, kubelet):
        await rig.until(lambda: kubelet.registrations and rig.api.beats)
        rig.api.pods.put_nowait(Snapshot((hostile("x"), granted("also-listed", tile(3)))))
        rig.api.pods.put_nowait(Change("MODIFIED", hostile("x")))
        await a_good_pod_starts(rig, kubelet, tmp_path)
        listed, evil = rig.agent.node_pods.get("also-listed"), rig.agent.node_pods.get("x")
        assert listed is not None
        assert listed.grant is not None
        assert evil is not None
        assert (evil.grant, "failed to parse the pod: OverflowError" in evil.fault) == (None, True)


async def test_a_pod_that_becomes_unparsable_keeps_its_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    node_pods = NodePods(DEFAULTS)
    await node_pods.set_cards(CARDS, "")
    await node_pods.changed(granted("a", tile(1), at=7), deleted=False)

    def fails(*_: Any) -> Any:
        raise ValueError("unexpected")

    monkeypatch.setattr(records, "read_grant", fails)
    await node_pods.changed(granted("a", tile(2), at=3), deleted=False)
    (node_pod,) = node_pods.all()
    assert node_pod.grant is not None
    assert (list(node_pod.grant.uses()), node_pod.order) == (["GPU-1"], (7, "a"))


async def test_an_edited_grant_keeps_its_place_in_the_order() -> None:
    node_pods = NodePods(DEFAULTS)
    await node_pods.set_cards(CARDS, "")
    await node_pods.listed([granted("first", tile(0), at=5), granted("second", tile(0), at=6)])
    await node_pods.changed(granted("second", tile(1), at=1), deleted=False)
    assert [node_pod.pod.uid for node_pod in node_pods.all()] == ["first", "second"]


# ---- loops ----------------------------------------------------------------------------------------------------------


def failing(rig: Rig, name: str, times: int) -> Callable[[], int]:
    """Make a part of the agent raise so many times; returns a function that counts its calls."""
    holder, _, method = name.rpartition(".")
    owner = rig.agent
    for part in filter(None, holder.split(".")):
        owner = getattr(owner, part)
    original, calls = getattr(owner, method), [0]

    def fails(*args: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] <= times:
            raise KeyError("unexpected")
        return original(*args, **more)

    setattr(owner, method, fails)
    return lambda: calls[0]


@pytest.mark.parametrize(
    ("part", "loop"),
    [
        pytest.param("cards.seen", "driver", id="polling-the-driver"),
        pytest.param("driver.wait", "xid", id="waiting-for-xid-errors"),
        pytest.param("heartbeat.beat", "heartbeat", id="the-heartbeat"),
        pytest.param("reporter.step", "report", id="reporting-the-node"),
        pytest.param("cdi_specs.remove_stale", "cleanup", id="removing-cdi-specs"),
        pytest.param("meter.sample", "usage", id="measuring-usage"),
        pytest.param("node_pods.changed", "pods", id="a-change-of-a-pod"),
        pytest.param("node_pods.listed", "pods", id="a-list-of-pods"),
        pytest.param("client.follow_pods", "pods", id="the-watch-on-pods"),
        pytest.param("reporter.seen", "node", id="a-change-of-the-node"),
    ],
)
async def test_a_loop_that_fails_continues(
    tmp_path: Path, part: str, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "CLEANUP_INTERVAL", 0.01)
    rig, stop = Rig(tmp_path, Rig.driver_of(*GPUS), report_use=True), asyncio.Event()
    calls = failing(rig, part, times=2)
    async with ScriptedKubelet(tmp_path) as kubelet:
        task = asyncio.create_task(rig.agent.run(stop))
        for number in range(3):
            rig.api.pods.put_nowait(Snapshot(()))
            rig.api.pods.put_nowait(Change("ADDED", granted(f"p{number}", tile(0, 1))))
            rig.api.annotate(turn=str(number))
        try:
            await rig.until(lambda: calls() > 2)
            await rig.until(lambda: kubelet.registrations and rig.api.inventory())
            await a_good_pod_starts(rig, kubelet, tmp_path)
            assert not task.done()
            metrics = rig.agent.metrics.text().decode()
            assert f'gputile_agent_loop_failures_total{{loop="{loop}"}} 2.0' in metrics
        finally:
            stop.set()
            await task


async def test_a_pod_that_fails_the_watch_loop_causes_no_new_list(tmp_path: Path) -> None:
    rig, stop = Rig(tmp_path, Rig.driver_of(*GPUS)), asyncio.Event()
    calls, follows = failing(rig, "node_pods.changed", times=3), failing(rig, "client.follow_pods", times=0)
    async with ScriptedKubelet(tmp_path) as kubelet:
        task = asyncio.create_task(rig.agent.run(stop))
        await rig.until(lambda: kubelet.registrations)
        for number in range(4):
            rig.api.pods.put_nowait(Change("ADDED", granted(f"p{number}", tile(0, 1))))
        await rig.until(lambda: calls() == 4 and rig.agent.node_pods.get("p3"))
        assert follows() == 1
        stop.set()
        await task


async def test_the_agent_exits_when_the_runtime_replaced_its_socket(tmp_path: Path) -> None:
    """A mount of a single socket keeps the old file; the kubelet mounts the new one when it restarts the container."""
    path = tmp_path / "cri.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        mounted = os.open(path, os.O_PATH)
    path.unlink()
    rig = Rig(tmp_path, Rig.driver_of(*GPUS), runtime=f"/proc/self/fd/{mounted}")
    try:
        async with ScriptedKubelet(tmp_path), asyncio.timeout(20):
            with pytest.raises(SocketReplaced, match="replaced its socket"):
                await rig.agent.run(asyncio.Event())
    finally:
        os.close(mounted)
    assert rig.api.beats[-1:] == ["withdrawn"], "no pod is bound here meanwhile"


# ---- forged grants --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pod", "message"),
    [
        pytest.param(forged("x"), "no GPU to a container", id="empty-tiles"),
        pytest.param(forged("x", TILE | {"memory": 0}), "no memory and no cores", id="a-tile-without-memory-and-cores"),
        pytest.param(forged("x", TILE | {"memory": 16385}), "16385 MiB", id="more-than-the-gpu-has"),
        pytest.param(forged("x", TILE, TILE | {"memory": 16384}), "17408 MiB", id="in-sum-more-than-the-gpu-has"),
        pytest.param(forged("x", TILE, version=2), "version 2", id="an-unknown-version"),
    ],
)
async def test_a_forged_grant_starts_no_container(tmp_path: Path, pod: Pod, message: str) -> None:
    async with running(tmp_path, *GPUS, grant_timeout=0.05) as (rig, kubelet):
        await rig.until(lambda: kubelet.registrations and rig.api.inventory())
        rig.api.pods.put_nowait(Change("ADDED", pod))
        request = wire.AllocateRequest(containers=[wire.DeviceIds(ids=["GPU-0::0"])])
        response = await kubelet.call("Allocate", request, wire.AllocateResponse)
        Kubelet(tmp_path).record("x", "c0", ["GPU-0::0"], response.containers[0])
        with pytest.raises(Exception, match=message):
            await kubelet.call("PreStartContainer", wire.DeviceIds(ids=["GPU-0::0"]), wire.Empty)
        assert not list((tmp_path / "cdi").glob("*"))


async def test_expected_containers_of_a_pod_with_many_are_matched_by_name() -> None:
    node_pods = NodePods(DEFAULTS)
    await node_pods.set_cards(CARDS, "")
    await node_pods.listed([several("a", {f"c{n}": (tile(0, 8),) for n in range(64)})])
    assert len(node_pods.expected(gputile.GPU, {("a", "c7")})) == 63


# ---- CDI specs ------------------------------------------------------------------------------------------------------


class TestDrafts:
    """How the file of a CDI spec is written."""

    def test_a_link_under_the_specs_name_is_replaced_and_not_followed(self, tmp_path: Path) -> None:
        folder, target = tmp_path / "cdi", tmp_path / "target"
        folder.mkdir()
        target.write_text("keep me")
        (folder / "gputile.io-slot_uid-a_aa.json").symlink_to(target)
        CdiSpecStore(folder).write("uid-a", "aa", {"env": []})
        assert target.read_text() == "keep me"
        assert not (folder / "gputile.io-slot_uid-a_aa.json").is_symlink()

    def test_a_draft_never_follows_a_link(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A link that appears under the draft's name makes the write fail."""
        target, original = tmp_path / "target", os.open
        target.write_text("keep me")
        folder = tmp_path / "cdi"

        def raced(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if flags & os.O_CREAT:
                os.symlink(target, path, dir_fd=dir_fd)
            return original(path, flags, mode, dir_fd=dir_fd)

        monkeypatch.setattr(os, "open", raced)
        with pytest.raises(FileExistsError):
            CdiSpecStore(folder).write("uid-a", "aa", {"env": []})
        assert target.read_text() == "keep me"
        assert not (folder / "gputile.io-slot_uid-a_aa.json").exists()

    @pytest.mark.parametrize(
        ("pod", "slot"),
        [
            pytest.param("../../etc/x", "aa", id="a-pod-with-a-parent-folder"),
            pytest.param("uid-a", "../aa", id="a-slot-with-a-parent-folder"),
            pytest.param("uid_a", "aa", id="a-pod-with-the-separator"),
            pytest.param("", "aa", id="an-empty-pod"),
            pytest.param("uid-a", "", id="an-empty-slot"),
            pytest.param("u" * 300, "aa", id="a-name-too-long-for-a-file"),
        ],
    )
    def test_a_name_that_is_invalid_in_a_file_name_is_rejected(self, tmp_path: Path, pod: str, slot: str) -> None:
        with pytest.raises(IsolationUnavailable):
            CdiSpecStore(tmp_path / "cdi").write(pod, slot, {"env": []})
        assert not (tmp_path / "cdi").exists()

    def test_drafts_of_a_killed_agent_are_removed(self, tmp_path: Path) -> None:
        (tmp_path / ".gputile.io-slot_a_aa.json.0a1b2c3d").write_text("half")
        CdiSpecStore(tmp_path).remove_stale(set())
        assert not list(tmp_path.iterdir())


# ---- isolation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("default", "requested", "any_allowed", "expected"),
    [
        pytest.param("devices", "", False, "devices", id="without-a-request-the-default"),
        pytest.param("devices", "devices", False, "devices", id="a-request-for-the-default"),
        pytest.param("none", "devices", False, "devices", id="devices-is-stronger-than-none"),
        pytest.param("none", "cdi", False, "cdi", id="cdi-is-stronger-than-none"),
        pytest.param("devices", "preload", False, "preload", id="preload-is-stronger-than-devices"),
        pytest.param("cdi", "mps", False, "mps", id="mps-is-stronger-than-cdi"),
        pytest.param("preload", "mps", False, "mps", id="mps-is-stronger-than-preload"),
        pytest.param("mps", "none", False, "not stronger than `mps`", id="none-is-weaker-than-mps"),
        pytest.param("mps", "preload", False, "not stronger than `mps`", id="preload-is-weaker-than-mps"),
        pytest.param("preload", "cdi", False, "choose `mps`, or remove", id="the-message-lists-stronger-ones"),
        pytest.param("devices", "cdi", False, "not stronger than `devices`", id="cdi-is-no-stronger-than-devices"),
        pytest.param("cdi", "devices", False, "not stronger than `cdi`", id="devices-is-no-stronger-than-cdi"),
        pytest.param("mps", "none", True, "none", id="a-weaker-one-where-pods-choose"),
        pytest.param("devices", "cdi", True, "cdi", id="an-equal-one-where-pods-choose"),
        pytest.param("none", "lead", True, "unknown isolation", id="an-unknown-isolation"),
        pytest.param("none", "x" * 999, False, f"'{'x' * 60}'; use one of", id="a-long-unknown-isolation-is-shortened"),
    ],
)
def test_which_isolation_a_pod_may_choose(default: str, requested: str, any_allowed: bool, expected: str) -> None:
    if expected in STRENGTH:
        assert choose(default, requested, any_allowed=any_allowed) == expected
        return
    with pytest.raises(IsolationUnavailable, match=expected):
        choose(default, requested, any_allowed=any_allowed)


def test_every_isolation_has_a_strength_and_pods_choose_no_weaker_one_by_default() -> None:
    assert set(STRENGTH) == set(ISOLATIONS)
    assert AgentSettings().pods_choose_isolation is False
