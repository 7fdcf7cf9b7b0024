"""From Allocate to the start of a container: it gets the GPUs of its grant, in whatever order the kubelet calls."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputile.agent.card_plugin import CardPlugin, NodeContext
from gputile.agent.cdi_specs import CdiSpecStore, slots_of
from gputile.agent.isolation import Json
from gputile.agent.node_pods import NodePods
from gputile.dialects import gputile
from gputile.dialects.kube_objects import Pod
from gputile.dialects.registry import device_resources
from gputile.dialects.settings import DEFAULTS
from gputile.kubelet.device_plugin import PluginError
from gputile.kubelet.messages import ContainerAllocateResponse
from gputile.telemetry.agent_metrics import AgentMetrics
from tests.agent.rig import CARDS, Kubelet, granted, several, tile, ungranted
from tests.effort import examples


class NoHost:
    """A node that serves only the isolation `none`."""

    def device_node(self, uuid: str) -> str:
        return ""

    def common_device_nodes(self) -> list[str]:
        return []

    def driver(self) -> str:
        return ""

    def nvidia_edits(self, uuid: str) -> list[Json]:
        return []

    def mps(self) -> str:
        return ""

    def preload(self) -> str:
        return ""


class Node:
    """A plugin with its pods, its kubelet's checkpoint and its CDI folder."""

    def __init__(
        self,
        folder: Path,
        *,
        has_cdi: bool = True,
        grant_timeout: float = 0.0,
        isolation: str = "none",
        pods_choose: bool = False,
    ) -> None:
        self.cdi = folder / "cdi"
        self.kubelet = Kubelet(folder)
        self.node_pods = NodePods(DEFAULTS)
        self.context = NodeContext(
            self.node_pods,
            CdiSpecStore(self.cdi),
            NoHost(),
            folder,
            isolation=isolation,
            pods_choose=pods_choose,
            grant_timeout=grant_timeout,
            has_cdi=has_cdi,
        )
        self.context.cards = {card.uuid: card for card in CARDS}
        (device_resource,) = device_resources([gputile.NAME], CARDS, DEFAULTS)
        self.plugin = CardPlugin(device_resource, self.context, AgentMetrics())

    async def pods(self, *pods: Pod) -> "Node":
        await self.node_pods.set_cards(CARDS, "")
        await self.node_pods.listed(pods)
        return self

    async def admit(self, pod: str, container: str, ids: list[str]) -> ContainerAllocateResponse:
        """As the kubelet does: Allocate, then write the checkpoint."""
        response = await self.plugin.allocate(ids)
        self.kubelet.record(pod, container, ids, response)
        return response

    def env(self, response: ContainerAllocateResponse) -> dict[str, str]:
        """The environment of a container that is created from this response."""
        (slot,) = slots_of(device.name for device in response.cdi_devices)
        (path,) = self.cdi.glob(f"*_{slot}.json")
        spec: dict[str, Any] = json.loads(path.read_text())
        (device,) = spec["devices"]
        assert (spec["kind"], device["name"]) == ("gputile.io/slot", slot)
        return dict(line.split("=", 1) for line in device["containerEdits"]["env"])


async def test_a_container_sees_the_gpu_of_its_grant_not_of_its_devices(tmp_path: Path) -> None:
    node = await Node(tmp_path).pods(granted("a", tile(2)))
    response = await node.admit("a", "c0", ["GPU-0::0"])
    assert response.envs == {"NVIDIA_VISIBLE_DEVICES": "void"}
    await node.plugin.pre_start_container(["GPU-0::0"])
    env = node.env(response)
    assert (env["NVIDIA_VISIBLE_DEVICES"], env["GPUTILE_MEMORY_MIB"]) == ("GPU-2", "4096")


@given(seed=st.integers(0, 2**32), count=st.integers(1, 12))
@examples(30)
def test_in_any_order_of_calls_each_container_gets_the_gpu_of_its_grant(
    tmp_path_factory: pytest.TempPathFactory, seed: int, count: int
) -> None:
    """Seen to fail when the start uses the card of the devices, or the oldest pending pod."""
    rng = random.Random(seed)

    async def wave() -> None:
        node = Node(tmp_path_factory.mktemp("wave"))
        cards = {f"p{n}": n % 4 for n in range(count)}
        await node.pods(*(granted(uid, tile(card, 512), at=n) for n, (uid, card) in enumerate(cards.items())))
        ids = [name for name, _ in node.plugin.device_resource.devices]
        rng.shuffle(ids)
        order = rng.sample(list(cards), count)
        responses = {uid: (ids[n], await node.admit(uid, "c0", [ids[n]])) for n, uid in enumerate(order)}
        for uid in rng.sample(list(cards), count):
            await node.plugin.pre_start_container([responses[uid][0]])
        seen = {uid: node.env(response)["NVIDIA_VISIBLE_DEVICES"] for uid, (_, response) in responses.items()}
        assert seen == {uid: f"GPU-{card}" for uid, card in cards.items()}

    asyncio.run(wave())


async def test_an_init_container_passes_its_devices_on_and_each_sees_its_own_gpu(tmp_path: Path) -> None:
    pod = several("a", {"init-0": (tile(1),), "c0": (tile(3),)})
    node = await Node(tmp_path).pods(pod)
    first, second = [await node.admit("a", name, ["GPU-0::0"]) for name in ("init-0", "c0")]
    await node.plugin.pre_start_container(["GPU-0::0"])
    assert node.env(first)["NVIDIA_VISIBLE_DEVICES"] == "GPU-1"
    assert node.env(second)["NVIDIA_VISIBLE_DEVICES"] == "GPU-3"


async def test_reused_devices_never_give_the_gpu_of_an_older_pod(tmp_path: Path) -> None:
    node = await Node(tmp_path).pods(granted("a", tile(1)))
    old = await node.admit("a", "c0", ["GPU-0::0"])
    await node.plugin.pre_start_container(["GPU-0::0"])
    node.kubelet = Kubelet(tmp_path)  # the pod ended, its devices are free
    await node.pods(granted("b", tile(3)))
    new = await node.admit("b", "c0", ["GPU-0::0"])
    assert new.cdi_devices != old.cdi_devices
    await node.plugin.pre_start_container(["GPU-0::0"])
    assert node.env(new)["NVIDIA_VISIBLE_DEVICES"] == "GPU-3"


async def test_a_pod_bound_by_another_scheduler_waits_for_its_grant(tmp_path: Path) -> None:
    node = await Node(tmp_path, grant_timeout=5.0).pods(ungranted("a"))
    response = await node.admit("a", "c0", ["GPU-0::0"])
    starting = asyncio.create_task(node.plugin.pre_start_container(["GPU-0::0"]))
    await asyncio.sleep(0)
    assert not starting.done()
    await node.node_pods.changed(granted("a", tile(2)), deleted=False)
    await starting
    assert node.env(response)["NVIDIA_VISIBLE_DEVICES"] == "GPU-2"


@pytest.mark.parametrize(
    ("pods", "message"),
    [
        pytest.param([], "has not seen the pod", id="a-pod-that-is-not-listed"),
        pytest.param([ungranted("a")], "has no GPU grant yet", id="a-pod-without-a-grant"),
        pytest.param(
            [
                granted(
                    "a",
                    tile(0),
                    container="c0",
                    limits={gputile.GPU: 1, gputile.MEMORY: 1},
                    annotations={"gputile.io/isolation": "lead"},
                )
            ],
            "unknown isolation 'lead'",
            id="an-unknown-isolation",
        ),
        pytest.param(
            [granted("a", tile(0), annotations={"gputile.io/isolation": "mps"})],
            "isolation `mps`",
            id="an-isolation-that-the-node-cannot-serve",
        ),
        pytest.param(
            [granted("b", tile(0, 16000), at=1), granted("a", tile(0), at=2)],
            "overlaps earlier grants, which hold 16000 of 16384",
            id="a-gpu-that-is-full",
        ),
        pytest.param(
            [
                several("a", {"c0": (tile(0),), "c1": (tile(0),)}, limits={gputile.GPU: 1, gputile.MEMORY: 4096}),
            ],
            "",
            id="two-containers-that-fit",
        ),
    ],
)
async def test_which_starts_are_rejected_and_why(tmp_path: Path, pods: list[Pod], message: str) -> None:
    node = await Node(tmp_path).pods(*pods)
    await node.admit("a", "c0", ["GPU-0::0"])
    if not message:
        await node.plugin.pre_start_container(["GPU-0::0"])
        return
    with pytest.raises(PluginError, match=message):
        await node.plugin.pre_start_container(["GPU-0::0"])
    assert not list(node.cdi.glob("*")) if node.cdi.exists() else True


async def test_of_two_overlapping_grants_the_older_one_is_served(tmp_path: Path) -> None:
    node = await Node(tmp_path).pods(granted("a", tile(0, 16000), at=1), granted("b", tile(0), at=2))
    response = await node.admit("a", "c0", ["GPU-0::0"])
    await node.plugin.pre_start_container(["GPU-0::0"])
    assert node.env(response)["NVIDIA_VISIBLE_DEVICES"] == "GPU-0"


async def test_an_edited_grant_changes_nothing(tmp_path: Path) -> None:
    node = await Node(tmp_path).pods(granted("a", tile(1)))
    await node.node_pods.changed(granted("a", tile(3)), deleted=False)
    response = await node.admit("a", "c0", ["GPU-0::0"])
    await node.plugin.pre_start_container(["GPU-0::0"])
    assert node.env(response)["NVIDIA_VISIBLE_DEVICES"] == "GPU-1"


async def test_devices_without_an_owner_are_rejected(tmp_path: Path) -> None:
    node = await Node(tmp_path).pods(granted("a", tile(1)))
    with pytest.raises(PluginError, match="does not have the owner"):
        await node.plugin.pre_start_container(["GPU-0::0"])


async def test_a_container_without_a_grant_is_rejected(tmp_path: Path) -> None:
    node = await Node(tmp_path).pods(granted("a", tile(1)))
    await node.admit("a", "other", ["GPU-0::0"])
    with pytest.raises(PluginError, match="no GPU for its container `other`"):
        await node.plugin.pre_start_container(["GPU-0::0"])


async def test_unhealthy_gpus_are_unhealthy_for_the_kubelet(tmp_path: Path) -> None:
    node = Node(tmp_path)
    cards = [*CARDS[:3], *(type(CARDS[3])(index=3, uuid="GPU-3", memory=1, healthy=False),)]
    node.context.cards = {card.uuid: card for card in cards}
    assert {device.id.split("::")[0] for device in node.plugin.devices() if not device.healthy} == {"GPU-3"}


async def test_the_kubelet_is_steered_to_the_granted_gpu(tmp_path: Path) -> None:
    node = await Node(tmp_path).pods(granted("a", tile(2), at=1), granted("b", tile(3), at=2))
    free = [name for name, _ in node.plugin.device_resource.devices]
    (first,) = await node.plugin.get_preferred_allocation(free, [], 1)
    await node.admit("a", "c0", [first])
    (second,) = await node.plugin.get_preferred_allocation([name for name in free if name != first], [], 1)
    assert (first, second) == ("GPU-2::0", "GPU-3::0")


class TestWithoutCdi:
    """Nodes whose runtime does not support CDI."""

    async def test_the_environment_is_in_the_response_of_allocate(self, tmp_path: Path) -> None:
        node = await Node(tmp_path, has_cdi=False).pods(granted("a", tile(2)))
        response = await node.admit("a", "c0", ["GPU-2::0"])
        assert response.envs["NVIDIA_VISIBLE_DEVICES"] == "GPU-2"
        assert response.cdi_devices == []
        await node.plugin.pre_start_container(["GPU-2::0"])

    async def test_devices_of_a_gpu_that_no_pod_was_granted_are_rejected(self, tmp_path: Path) -> None:
        node = await Node(tmp_path, has_cdi=False).pods(granted("a", tile(2)))
        with pytest.raises(PluginError, match="none of the pods starting on this node"):
            await node.plugin.allocate(["GPU-1::0"])

    async def test_a_container_with_the_devices_of_another_pod_is_rejected(self, tmp_path: Path) -> None:
        node = await Node(tmp_path, has_cdi=False).pods(granted("a", tile(2)), granted("b", tile(1)))
        await node.admit("a", "c0", ["GPU-1::0"])
        with pytest.raises(PluginError, match="another GPU than granted"):
            await node.plugin.pre_start_container(["GPU-1::0"])

    async def test_a_pod_that_is_not_listed_yet_is_waited_for(self, tmp_path: Path) -> None:
        node = await Node(tmp_path, has_cdi=False, grant_timeout=5.0).pods()
        preferred = asyncio.create_task(node.plugin.get_preferred_allocation(["GPU-0::0", "GPU-2::0"], [], 1))
        allocated = asyncio.create_task(node.plugin.allocate(["GPU-2::0"]))
        await asyncio.sleep(0)
        await node.node_pods.changed(granted("a", tile(2)), deleted=False)
        assert await preferred == ["GPU-2::0"]
        assert (await allocated).envs["NVIDIA_VISIBLE_DEVICES"] == "GPU-2"

    async def test_a_pod_of_another_dialect_on_the_same_gpu_is_skipped(self, tmp_path: Path) -> None:
        other = granted("a", tile(1, 8192), at=1, limits={"aliyun.com/gpu-mem": 8})
        node = await Node(tmp_path, has_cdi=False).pods(other, granted("b", tile(1, 4096), at=2))
        assert (await node.plugin.allocate(["GPU-1::0"])).envs["GPUTILE_MEMORY_MIB"] == "4096"

    async def test_an_isolation_that_needs_cdi_is_rejected(self, tmp_path: Path) -> None:
        node = await Node(tmp_path, has_cdi=False, isolation="devices").pods(granted("a", tile(1)))
        with pytest.raises(PluginError, match="needs CDI"):
            await node.plugin.allocate(["GPU-1::0"])

    async def test_the_spec_of_an_earlier_slot_is_still_written(self, tmp_path: Path) -> None:
        node = await Node(tmp_path).pods(granted("a", tile(2)))
        response = await node.admit("a", "c0", ["GPU-0::0"])
        node.context.has_cdi = False  # the runtime did not response when the agent restarted
        await node.plugin.pre_start_container(["GPU-0::0"])
        assert node.env(response)["NVIDIA_VISIBLE_DEVICES"] == "GPU-2"


async def test_orphaned_pods_count_as_earlier_grants(tmp_path: Path) -> None:
    node = await Node(tmp_path).pods(granted("b", tile(0), at=2))
    gone = NodePods(DEFAULTS)
    await gone.set_cards(CARDS, "")
    await gone.listed([granted("a", tile(0, 16000), at=1)])
    node.context.orphans = tuple(node_pod.grant for node_pod in gone.all() if node_pod.grant)
    await node.admit("b", "c0", ["GPU-0::0"])
    with pytest.raises(PluginError, match="overlaps"):
        await node.plugin.pre_start_container(["GPU-0::0"])


async def test_a_weaker_isolation_is_rejected_where_pods_may_not_choose(tmp_path: Path) -> None:
    weaker = granted("a", tile(1), annotations={gputile.ISOLATION: "none"})
    node = await Node(tmp_path, isolation="mps", pods_choose=False).pods(weaker)
    await node.admit("a", "c0", ["GPU-1::0"])
    with pytest.raises(PluginError, match="`none` is not stronger than `mps`"):
        await node.plugin.pre_start_container(["GPU-1::0"])


async def test_a_grant_of_an_unknown_dialect_still_sets_the_visible_devices(tmp_path: Path) -> None:
    pod = granted("a", tile(1))
    grant = json.loads(str(pod.annotations[gputile.GRANT])) | {"dialect": "of-tomorrow"}
    annotations = {gputile.GRANT: json.dumps(grant)}
    foreign = msgspec.convert(msgspec.to_builtins(ungranted("a")), Pod)
    assert foreign.metadata
    foreign = msgspec.structs.replace(
        foreign, metadata=msgspec.structs.replace(foreign.metadata, annotations=annotations)
    )
    node = await Node(tmp_path).pods(foreign)
    response = await node.admit("a", "c0", ["GPU-0::0"])
    await node.plugin.pre_start_container(["GPU-0::0"])
    assert node.env(response) == {"NVIDIA_VISIBLE_DEVICES": "GPU-1"}
