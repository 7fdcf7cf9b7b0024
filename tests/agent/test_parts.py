"""The small pure parts: preferred allocation, overlap, CDI specs, inventory, consistency."""

from pathlib import Path

import pytest

from gputile.agent.cdi_specs import CdiSpecStore, device_name, new_slot, slots_of
from gputile.agent.consistency import Inconsistencies, compare
from gputile.agent.inventory import inventory, label_value, labels
from gputile.agent.node_pods import NodePods
from gputile.agent.overlap import CardAllocations, overlap
from gputile.agent.preferred_allocation import ExpectedContainer, preferred_devices
from gputile.dialects import gputile
from gputile.dialects.kube_objects import Pod
from gputile.dialects.settings import DEFAULTS
from gputile.kubelet.checkpoint import CheckpointEntry
from gputile.model.grants import ContainerGrant, Grant
from gputile.model.requests import Role
from gputile.nvml.driver import DriverGpu, DriverSnapshot
from tests.agent.rig import CARDS, NODE, granted, tile, ungranted

BY_UUID = {card.uuid: card for card in CARDS}
DEVICES = {f"GPU-{card}::{n}": f"GPU-{card}" for card in range(4) for n in range(10)}


def container_grant(*cards: int, name: str = "c0", memory: int = 4096) -> ContainerGrant:
    return ContainerGrant(name, tuple(tile(card, memory) for card in cards))


def expected(size: int, *cards: int) -> ExpectedContainer:
    return ExpectedContainer("a", container_grant(*cards), size)


class TestPreferredAllocation:
    """Which devices the kubelet should allocate."""

    @pytest.mark.parametrize(
        ("waiting", "must", "size", "preferred"),
        [
            pytest.param([expected(1, 2)], [], 1, ["GPU-2::0"], id="the-granted-gpu"),
            pytest.param([expected(2, 3, 1)], [], 2, ["GPU-3::0", "GPU-1::0"], id="one-of-each-gpu"),
            pytest.param([expected(2, 3, 3)], [], 2, ["GPU-3::0", "GPU-3::1"], id="two-tiles-of-one-gpu"),
            pytest.param([expected(3, 2)], [], 3, ["GPU-2::0", "GPU-2::1", "GPU-2::2"], id="many-of-one-gpu"),
            pytest.param(
                [expected(2, 1), expected(1, 2)],
                [],
                1,
                ["GPU-2::0"],
                id="only-containers-of-the-same-size",
            ),
            pytest.param([expected(1, 1), expected(1, 2)], [], 1, ["GPU-1::0"], id="earlier-grants-first"),
            pytest.param([expected(1, 2)], ["GPU-2::7"], 1, ["GPU-2::7"], id="must-include"),
            pytest.param(
                [expected(1, 2), expected(1, 0)],
                ["GPU-0::7"],
                1,
                ["GPU-0::7"],
                id="must-include-identifies-the-container",
            ),
            pytest.param([], [], 1, ["GPU-0::0"], id="no-container-is-expected"),
            pytest.param([expected(1, 2)], ["GPU-0::1"], 1, ["GPU-0::1"], id="must-include-wins-over-the-grant"),
        ],
    )
    def test_which_devices(
        self, waiting: list[ExpectedContainer], must: list[str], size: int, preferred: list[str]
    ) -> None:
        assert preferred_devices(list(DEVICES), must, size, waiting, DEVICES) == preferred

    def test_a_gpu_without_devices_left_is_skipped(self) -> None:
        free = [name for name in DEVICES if not name.startswith("GPU-2")]
        assert preferred_devices(free, [], 1, [expected(1, 2)], DEVICES) == ["GPU-0::0"]


def grant(uid: str, *parts: ContainerGrant) -> Grant:
    return Grant(pod=uid, node=NODE, dialect="gputile", containers=parts)


class TestOverlap:
    """Whether a grant fits beside earlier grants."""

    @pytest.mark.parametrize(
        ("mine", "others", "message"),
        [
            pytest.param(grant("a", container_grant(0)), [], "", id="alone"),
            pytest.param(
                grant("a", container_grant(0)),
                [grant("b", container_grant(0)), grant("c", container_grant(1))],
                "",
                id="beside-others",
            ),
            pytest.param(
                grant("a", ContainerGrant("c", (tile(0, 12289),))),
                [grant("b", container_grant(0))],
                "12289 MiB of memory of GPU 0",
                id="one-mebibyte-too-much",
            ),
            pytest.param(
                grant("a", ContainerGrant("c", (tile(0, 1, 60),))),
                [grant("b", ContainerGrant("c", (tile(0, 1, 50),)))],
                "60 percent of the cores of GPU 0",
                id="cores",
            ),
            pytest.param(
                grant("a", ContainerGrant("c", (tile(0, 1, 0),))),
                [grant("b", ContainerGrant("c", (tile(0, 1, 100),)))],
                "",
                id="without-cores-there-is-no-overlap",
            ),
            pytest.param(
                grant("a", container_grant(0, memory=20000)),
                [],
                "20000 MiB of memory of GPU 0 (GPU-0), which has 16384",
                id="more-memory-than-the-gpu-has",
            ),
            pytest.param(
                grant("a", ContainerGrant("c", (tile(0, 1, 101),))),
                [],
                "101 percent of the cores of GPU 0 (GPU-0), which has 100",
                id="more-cores-than-the-gpu-has",
            ),
            pytest.param(grant("a", container_grant(0, memory=16384)), [], "", id="the-whole-gpu"),
            pytest.param(
                grant("a", container_grant(0), ContainerGrant("i", (tile(0, 16384),), Role.INIT)),
                [],
                "",
                id="init-and-app-containers-run-one-after-the-other",
            ),
        ],
    )
    def test_table(self, mine: Grant, others: list[Grant], message: str) -> None:
        why = overlap(mine.uses(), CardAllocations(others), BY_UUID)
        assert message in why if message else why == ""

    def test_a_gpu_of_another_node(self) -> None:
        assert "not on this node" in overlap(grant("a", container_grant(0)).uses(), CardAllocations(), {})


class TestCdiSpecs:
    """Names and files of CDI specs."""

    def test_slots_are_unique(self) -> None:
        assert len({new_slot() for _ in range(1000)}) == 1000

    def test_slots_among_cdi_devices(self) -> None:
        assert slots_of([device_name("ab"), "nvidia.com/gpu=0"]) == ["ab"]

    def test_specs_of_gone_pods_are_removed_and_other_files_stay(self, tmp_path: Path) -> None:
        store = CdiSpecStore(tmp_path)
        store.write("uid-a", "aa", {"env": []})
        store.write("uid-b", "bb", {"env": []})
        (tmp_path / "nvidia.yaml").write_text("kind: nvidia.com/gpu")
        (tmp_path / ".gputile.io-slot_uid-c_cc.json.1").write_text("half")
        assert (tmp_path / "gputile.io-slot_uid-a_aa.json").exists()
        assert store.remove_stale({"uid-b"}) == 1
        assert sorted(path.name for path in tmp_path.iterdir()) == ["gputile.io-slot_uid-b_bb.json", "nvidia.yaml"]


class TestInventory:
    """Cards and labels from the driver's snapshot."""

    def test_gpus_of_the_driver_become_cards(self) -> None:
        gpu = DriverGpu(index=1, uuid="GPU-x", model="Tesla T4", memory=15109, numa=1, pci="0000:3b:00.0", is_mig=True)
        (card,) = inventory(DriverSnapshot(gpus=(gpu,)), {"GPU-x": "XID 79: fallen off the bus"}, 7).cards
        assert (card.memory, card.slots, card.numa, card.mode) == (15109, 7, 1, "mig")
        assert (card.healthy, card.reason) == (False, "XID 79: fallen off the bus")

    @pytest.mark.parametrize(
        ("models", "label"),
        [
            pytest.param(["Tesla T4"], "Tesla-T4", id="blanks-become-dashes"),
            pytest.param(["Tesla T4", "Tesla T4"], "Tesla-T4", id="one-model"),
            pytest.param(["Tesla T4", "A100"], "mixed", id="two-models"),
            pytest.param([], None, id="no-gpu"),
        ],
    )
    def test_the_label_of_the_model(self, models: list[str], label: str | None) -> None:
        gpus = tuple(DriverGpu(index=n, uuid=str(n), model=model, memory=1) for n, model in enumerate(models))
        assert labels(DriverSnapshot(gpus=gpus), "none")["gputile.io/gpu-model"] == label

    @pytest.mark.parametrize(
        ("text", "value"), [("(A100)", "A100"), ("x" * 80, "x" * 63), ("--", None), ("Ä", None), ("12.4", "12.4")]
    )
    def test_labels_are_valid_in_kubernetes(self, text: str, value: str | None) -> None:
        assert label_value(text) == value


def entry(pod: str, *ids: str, container: str = "c0", cdi: tuple[str, ...] = ("gputile.io/slot=1",)) -> CheckpointEntry:
    return CheckpointEntry(pod=pod, container=container, resource=gputile.GPU, ids=frozenset(ids), cdi=cdi)


class TestConsistency:
    """Checkpoint, grants and cards compared."""

    @pytest.mark.parametrize(
        ("pods", "entries", "kinds", "elsewhere"),
        [
            pytest.param([granted("a", tile(0))], [entry("a", "GPU-0::1")], {}, 0, id="all-agree"),
            pytest.param([granted("a", tile(0))], [entry("a", "GPU-2::1")], {}, 1, id="devices-of-another-gpu"),
            pytest.param([ungranted("a")], [entry("a", "GPU-0::1")], {"ungranted": 1}, 0, id="a-pod-without-a-grant"),
            pytest.param(
                [granted("a", tile(0))],
                [entry("a", "GPU-0::1", container="x")],
                {"unnamed": 1},
                0,
                id="a-container-without-a-grant",
            ),
            pytest.param(
                [granted("a", tile(0))],
                [entry("a", "GPU-0::1", cdi=())],
                {"not-served": 1},
                0,
                id="served-by-another-plugin-with-devices-of-the-same-names",
            ),
            pytest.param([granted("a", tile(0))], [entry("gone", "GPU-0::1")], {}, 0, id="a-pod-that-ended"),
            pytest.param(
                [granted("a", tile(0, 16000), at=1), granted("b", tile(0), at=2)],
                [],
                {"overlap": 1},
                0,
                id="double-allocated",
            ),
            pytest.param([granted("a", tile(0))], None, {"checkpoint": 1}, 0, id="an-unreadable-checkpoint"),
        ],
    )
    async def test_table(
        self, pods: list[Pod], entries: list[CheckpointEntry] | None, kinds: dict[str, int], elsewhere: int
    ) -> None:
        node_pods = NodePods(DEFAULTS)
        await node_pods.set_cards(CARDS, "")
        await node_pods.listed(pods)
        result: Inconsistencies = compare(node_pods.all(), entries, {gputile.GPU: DEVICES}, BY_UUID)
        assert {kind: len(messages) for kind, messages in result.by_kind.items() if messages} == kinds
        assert result.elsewhere == elsewhere

    async def test_an_edited_grant_is_reported(self) -> None:
        node_pods = NodePods(DEFAULTS)
        await node_pods.set_cards(CARDS, "")
        await node_pods.listed([granted("a", tile(0))])
        await node_pods.changed(granted("a", tile(1)), deleted=False)
        result = compare(node_pods.all(), [], {}, BY_UUID)
        assert len(result.by_kind["edited"]) == 1
