"""From Allocate to the container's start: exactly its card, whatever order the kubelet takes."""

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
from gputile.dialects.device_resources import device_resources
from gputile.dialects.kube_objects import Pod
from gputile.dialects.settings import DEFAULTS
from gputile.kubelet.device_plugin import PluginError
from gputile.kubelet.messages import ContainerAllocateResponse
from gputile.telemetry.agent_metrics import AgentMetrics
from tests.agent.rig import CARDS, Kubelet, granted, several, tile, ungranted
from tests.effort import examples


class NoHost:
    """A node that has nothing but its cards."""

    def node_of(self, uuid: str) -> str:
        return ""

    def common_nodes(self) -> list[str]:
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
        early: bool = False,
        hold: float = 0.0,
        isolation: str = "none",
        pods_choose: bool = False,
    ) -> None:
        self.cdi = folder / "cdi"
        self.kubelet = Kubelet(folder)
        self.node_pods = NodePods(DEFAULTS)
        self.shared = NodeContext(
            self.node_pods,
            CdiSpecStore(self.cdi),
            NoHost(),
            folder,
            isolation=isolation,
            pods_choose=pods_choose,
            hold=hold,
            early=early,
        )
        self.shared.cards = {card.uuid: card for card in CARDS}
        (carrier,) = device_resources(gputile.NAME, CARDS, DEFAULTS, shares_nvidia=False)
        self.plugin = CardPlugin(carrier, self.shared, AgentMetrics())

    async def pods(self, *pods: Pod) -> "Node":
        await self.node_pods.serves(CARDS, "")
        await self.node_pods.listed(pods)
        return self

    async def admit(self, pod: str, container: str, ids: list[str]) -> ContainerAllocateResponse:
        """What the kubelet does: Allocate, then write it down."""
        answer = await self.plugin.allocate(ids)
        self.kubelet.gave(pod, container, ids, answer)
        return answer

    def env(self, answer: ContainerAllocateResponse) -> dict[str, str]:
        """What a container made from this answer would see."""
        (slot,) = slots_of(device.name for device in answer.cdi_devices)
        (path,) = self.cdi.glob(f"*_{slot}.json")
        said: dict[str, Any] = json.loads(path.read_text())
        (device,) = said["devices"]
        assert (said["kind"], device["name"]) == ("gputile.io/slot", slot)
        return dict(line.split("=", 1) for line in device["containerEdits"]["env"])


async def test_a_container_sees_the_card_of_its_grant_not_of_its_devices(tmp_path: Path) -> None:
    node = await Node(tmp_path).pods(granted("a", tile(2)))
    answer = await node.admit("a", "c0", ["GPU-0::0"])
    assert answer.envs == {"NVIDIA_VISIBLE_DEVICES": "void"}
    await node.plugin.start(["GPU-0::0"])
    env = node.env(answer)
    assert (env["NVIDIA_VISIBLE_DEVICES"], env["GPUTILE_MEMORY_MIB"]) == ("GPU-2", "4096")


@given(seed=st.integers(0, 2**32), count=st.integers(1, 12))
@examples(30)
def test_whatever_order_the_kubelet_takes_everybody_gets_their_own(
    tmp_path_factory: pytest.TempPathFactory, seed: int, count: int
) -> None:
    """Seen to fail when the start looks at the devices' card, or at the oldest pod that waits."""
    dice = random.Random(seed)

    async def wave() -> None:
        node = Node(tmp_path_factory.mktemp("wave"))
        cards = {f"p{n}": n % 4 for n in range(count)}
        await node.pods(*(granted(uid, tile(card, 512), at=n) for n, (uid, card) in enumerate(cards.items())))
        ids = [name for name, _ in node.plugin.carrier.devices]
        dice.shuffle(ids)
        order = dice.sample(list(cards), count)
        answers = {uid: (ids[n], await node.admit(uid, "c0", [ids[n]])) for n, uid in enumerate(order)}
        for uid in dice.sample(list(cards), count):
            await node.plugin.start([answers[uid][0]])
        seen = {uid: node.env(answer)["NVIDIA_VISIBLE_DEVICES"] for uid, (_, answer) in answers.items()}
        assert seen == {uid: f"GPU-{card}" for uid, card in cards.items()}

    asyncio.run(wave())


async def test_an_init_container_lends_its_devices_and_each_sees_its_own_card(tmp_path: Path) -> None:
    pod = several("a", {"init-0": (tile(1),), "c0": (tile(3),)})
    node = await Node(tmp_path).pods(pod)
    first, second = [await node.admit("a", name, ["GPU-0::0"]) for name in ("init-0", "c0")]
    await node.plugin.start(["GPU-0::0"])
    assert node.env(first)["NVIDIA_VISIBLE_DEVICES"] == "GPU-1"
    assert node.env(second)["NVIDIA_VISIBLE_DEVICES"] == "GPU-3"


async def test_devices_used_again_never_lead_to_an_older_pods_card(tmp_path: Path) -> None:
    node = await Node(tmp_path).pods(granted("a", tile(1)))
    old = await node.admit("a", "c0", ["GPU-0::0"])
    await node.plugin.start(["GPU-0::0"])
    node.kubelet = Kubelet(tmp_path)  # the pod ended, its devices are free
    await node.pods(granted("b", tile(3)))
    new = await node.admit("b", "c0", ["GPU-0::0"])
    assert new.cdi_devices != old.cdi_devices
    await node.plugin.start(["GPU-0::0"])
    assert node.env(new)["NVIDIA_VISIBLE_DEVICES"] == "GPU-3"


async def test_a_pod_that_came_around_us_waits_for_its_grant(tmp_path: Path) -> None:
    node = await Node(tmp_path, hold=5.0).pods(ungranted("a"))
    answer = await node.admit("a", "c0", ["GPU-0::0"])
    starting = asyncio.create_task(node.plugin.start(["GPU-0::0"]))
    await asyncio.sleep(0)
    assert not starting.done()
    await node.node_pods.changed(granted("a", tile(2)), deleted=False)
    await starting
    assert node.env(answer)["NVIDIA_VISIBLE_DEVICES"] == "GPU-2"


@pytest.mark.parametrize(
    ("pods", "says"),
    [
        pytest.param([], "has not heard of the pod", id="a-pod-that-nobody-showed-us"),
        pytest.param([ungranted("a")], "has no grant of a card yet", id="no-grant"),
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
            "'lead' is not known",
            id="an-isolation-that-is-none",
        ),
        pytest.param(
            [granted("a", tile(0), annotations={"gputile.io/isolation": "mps"})],
            "isolation `mps`",
            id="an-isolation-that-the-node-lacks",
        ),
        pytest.param(
            [granted("b", tile(0, 16000), at=1), granted("a", tile(0), at=2)],
            "overlaps earlier ones, which hold 16000 of 16384",
            id="a-card-that-is-full",
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
async def test_what_is_refused_and_why(tmp_path: Path, pods: list[Pod], says: str) -> None:
    node = await Node(tmp_path).pods(*pods)
    await node.admit("a", "c0", ["GPU-0::0"])
    if not says:
        await node.plugin.start(["GPU-0::0"])
        return
    with pytest.raises(PluginError, match=says):
        await node.plugin.start(["GPU-0::0"])
    assert not list(node.cdi.glob("*")) if node.cdi.exists() else True


async def test_the_one_that_came_first_is_served_where_two_overlap(tmp_path: Path) -> None:
    node = await Node(tmp_path).pods(granted("a", tile(0, 16000), at=1), granted("b", tile(0), at=2))
    answer = await node.admit("a", "c0", ["GPU-0::0"])
    await node.plugin.start(["GPU-0::0"])
    assert node.env(answer)["NVIDIA_VISIBLE_DEVICES"] == "GPU-0"


async def test_a_grant_that_is_edited_later_changes_nothing(tmp_path: Path) -> None:
    node = await Node(tmp_path).pods(granted("a", tile(1)))
    await node.node_pods.changed(granted("a", tile(3)), deleted=False)
    answer = await node.admit("a", "c0", ["GPU-0::0"])
    await node.plugin.start(["GPU-0::0"])
    assert node.env(answer)["NVIDIA_VISIBLE_DEVICES"] == "GPU-1"


async def test_devices_that_nobody_owns_are_refused(tmp_path: Path) -> None:
    node = await Node(tmp_path).pods(granted("a", tile(1)))
    with pytest.raises(PluginError, match="does not say yet"):
        await node.plugin.start(["GPU-0::0"])


async def test_a_container_that_the_grant_does_not_name(tmp_path: Path) -> None:
    node = await Node(tmp_path).pods(granted("a", tile(1)))
    await node.admit("a", "other", ["GPU-0::0"])
    with pytest.raises(PluginError, match="no card for its container `other`"):
        await node.plugin.start(["GPU-0::0"])


async def test_cards_out_of_use_leave_the_kubelet(tmp_path: Path) -> None:
    node = Node(tmp_path)
    sick = [*CARDS[:3], *(type(CARDS[3])(index=3, uuid="GPU-3", memory=1, healthy=False),)]
    node.shared.cards = {card.uuid: card for card in sick}
    assert {device.id.split("::")[0] for device in node.plugin.devices() if not device.healthy} == {"GPU-3"}


async def test_the_kubelet_is_led_to_the_booked_card(tmp_path: Path) -> None:
    node = await Node(tmp_path).pods(granted("a", tile(2), at=1), granted("b", tile(3), at=2))
    free = [name for name, _ in node.plugin.carrier.devices]
    (first,) = await node.plugin.prefer(free, [], 1)
    await node.admit("a", "c0", [first])
    (second,) = await node.plugin.prefer([name for name in free if name != first], [], 1)
    assert (first, second) == ("GPU-2::0", "GPU-3::0")


class TestWithoutCdi:
    async def test_the_environment_is_given_at_once_by_the_devices(self, tmp_path: Path) -> None:
        node = await Node(tmp_path, early=True).pods(granted("a", tile(2)))
        answer = await node.admit("a", "c0", ["GPU-2::0"])
        assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == "GPU-2"
        assert answer.cdi_devices == []
        await node.plugin.start(["GPU-2::0"])

    async def test_devices_of_a_card_that_nobody_was_granted_are_refused(self, tmp_path: Path) -> None:
        node = await Node(tmp_path, early=True).pods(granted("a", tile(2)))
        with pytest.raises(PluginError, match="no pod of this node"):
            await node.plugin.allocate(["GPU-1::0"])

    async def test_a_container_with_another_pods_devices_does_not_start(self, tmp_path: Path) -> None:
        node = await Node(tmp_path, early=True).pods(granted("a", tile(2)), granted("b", tile(1)))
        await node.admit("a", "c0", ["GPU-1::0"])
        with pytest.raises(PluginError, match="another card than was booked"):
            await node.plugin.start(["GPU-1::0"])

    async def test_a_pod_that_is_not_seen_yet_is_waited_for(self, tmp_path: Path) -> None:
        node = await Node(tmp_path, early=True, hold=5.0).pods()
        preferred = asyncio.create_task(node.plugin.prefer(["GPU-0::0", "GPU-2::0"], [], 1))
        given = asyncio.create_task(node.plugin.allocate(["GPU-2::0"]))
        await asyncio.sleep(0)
        await node.node_pods.changed(granted("a", tile(2)), deleted=False)
        assert await preferred == ["GPU-2::0"]
        assert (await given).envs["NVIDIA_VISIBLE_DEVICES"] == "GPU-2"

    async def test_a_pod_of_another_dialect_on_the_same_card_is_not_meant(self, tmp_path: Path) -> None:
        other = granted("a", tile(1, 8192), at=1, limits={"aliyun.com/gpu-mem": 8})
        node = await Node(tmp_path, early=True).pods(other, granted("b", tile(1, 4096), at=2))
        assert (await node.plugin.allocate(["GPU-1::0"])).envs["GPUTILE_MEMORY_MIB"] == "4096"

    async def test_an_isolation_that_needs_cdi_is_refused(self, tmp_path: Path) -> None:
        node = await Node(tmp_path, early=True, isolation="devices").pods(granted("a", tile(1)))
        with pytest.raises(PluginError, match="needs CDI"):
            await node.plugin.allocate(["GPU-1::0"])

    async def test_a_slot_given_out_before_is_still_filled(self, tmp_path: Path) -> None:
        node = await Node(tmp_path).pods(granted("a", tile(2)))
        answer = await node.admit("a", "c0", ["GPU-0::0"])
        node.shared.early = True  # the runtime was silent when the agent came back
        await node.plugin.start(["GPU-0::0"])
        assert node.env(answer)["NVIDIA_VISIBLE_DEVICES"] == "GPU-2"


async def test_what_runs_on_of_deleted_pods_is_in_the_way(tmp_path: Path) -> None:
    node = await Node(tmp_path).pods(granted("b", tile(0), at=2))
    gone = NodePods(DEFAULTS)
    await gone.serves(CARDS, "")
    await gone.listed([granted("a", tile(0, 16000), at=1)])
    node.shared.orphans = tuple(one.grant for one in gone.all() if one.grant)
    await node.admit("b", "c0", ["GPU-0::0"])
    with pytest.raises(PluginError, match="overlaps"):
        await node.plugin.start(["GPU-0::0"])


async def test_where_pods_may_not_choose_another_isolation_is_refused(tmp_path: Path) -> None:
    weaker = granted("a", tile(1), annotations={gputile.ISOLATION: "none"})
    node = await Node(tmp_path, isolation="mps", pods_choose=False).pods(weaker)
    await node.admit("a", "c0", ["GPU-1::0"])
    with pytest.raises(PluginError, match="`none` is not stronger than `mps`"):
        await node.plugin.start(["GPU-1::0"])


async def test_a_grant_of_a_dialect_that_the_pod_does_not_speak_still_names_its_card(tmp_path: Path) -> None:
    made = granted("a", tile(1))
    grant = json.loads(str(made.annotations[gputile.GRANT])) | {"dialect": "of-tomorrow"}
    annotations = {gputile.GRANT: json.dumps(grant)}
    strange = msgspec.convert(msgspec.to_builtins(ungranted("a")), Pod)
    assert strange.metadata
    strange = msgspec.structs.replace(
        strange, metadata=msgspec.structs.replace(strange.metadata, annotations=annotations)
    )
    node = await Node(tmp_path).pods(strange)
    answer = await node.admit("a", "c0", ["GPU-0::0"])
    await node.plugin.start(["GPU-0::0"])
    assert node.env(answer) == {"NVIDIA_VISIBLE_DEVICES": "GPU-1"}
