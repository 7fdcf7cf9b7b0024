"""The small pure parts: preferring, overlapping, slots, inventory, comparing."""

from pathlib import Path

import pytest

from gputile.agent.cdi_specs import CdiSpecStore, device_name, new_slot, slots_of
from gputile.agent.consistency import Inconsistencies, compare
from gputile.agent.inventory import inventory, label_value, labels
from gputile.agent.node_pods import NodePods
from gputile.agent.overlap import CardAllocations, overlap
from gputile.agent.preferred_allocation import ExpectedContainer, prefer
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


def held(*cards: int, name: str = "c0", memory: int = 4096) -> ContainerGrant:
    return ContainerGrant(name, tuple(tile(card, memory) for card in cards))


def expected(size: int, *cards: int) -> ExpectedContainer:
    return ExpectedContainer("a", held(*cards), size)


class TestPreferring:
    @pytest.mark.parametrize(
        ("waiting", "must", "size", "want"),
        [
            pytest.param([expected(1, 2)], [], 1, ["GPU-2::0"], id="the-booked-card"),
            pytest.param([expected(2, 3, 1)], [], 2, ["GPU-3::0", "GPU-1::0"], id="one-of-each-card"),
            pytest.param([expected(2, 3, 3)], [], 2, ["GPU-3::0", "GPU-3::1"], id="two-tiles-of-one-card"),
            pytest.param([expected(3, 2)], [], 3, ["GPU-2::0", "GPU-2::1", "GPU-2::2"], id="many-of-one-card"),
            pytest.param(
                [expected(2, 1), expected(1, 2)],
                [],
                1,
                ["GPU-2::0"],
                id="only-who-asks-for-as-many",
            ),
            pytest.param([expected(1, 1), expected(1, 2)], [], 1, ["GPU-1::0"], id="first-granted-first"),
            pytest.param([expected(1, 2)], ["GPU-2::7"], 1, ["GPU-2::7"], id="what-must-be-taken"),
            pytest.param(
                [expected(1, 2), expected(1, 0)],
                ["GPU-0::7"],
                1,
                ["GPU-0::7"],
                id="what-must-be-taken-tells-who-it-is",
            ),
            pytest.param([], [], 1, ["GPU-0::0"], id="nobody-is-expected"),
            pytest.param([expected(1, 2)], ["GPU-0::1"], 1, ["GPU-0::1"], id="must-wins-over-a-wish"),
        ],
    )
    def test_which_devices(self, waiting: list[ExpectedContainer], must: list[str], size: int, want: list[str]) -> None:
        assert prefer(list(DEVICES), must, size, waiting, DEVICES) == want

    def test_a_card_without_devices_left_is_no_preference(self) -> None:
        free = [name for name in DEVICES if not name.startswith("GPU-2")]
        assert prefer(free, [], 1, [expected(1, 2)], DEVICES) == ["GPU-0::0"]


def grant(uid: str, *parts: ContainerGrant) -> Grant:
    return Grant(pod=uid, node=NODE, dialect="gputile", containers=parts)


class TestOverlapping:
    @pytest.mark.parametrize(
        ("mine", "others", "says"),
        [
            pytest.param(grant("a", held(0)), [], "", id="alone"),
            pytest.param(grant("a", held(0)), [grant("b", held(0)), grant("c", held(1))], "", id="beside-others"),
            pytest.param(
                grant("a", ContainerGrant("c", (tile(0, 12289),))),
                [grant("b", held(0))],
                "12289 MiB of memory of card 0",
                id="one-mebibyte-too-much",
            ),
            pytest.param(
                grant("a", ContainerGrant("c", (tile(0, 1, 60),))),
                [grant("b", ContainerGrant("c", (tile(0, 1, 50),)))],
                "60 percent of the cores of card 0",
                id="cores",
            ),
            pytest.param(
                grant("a", ContainerGrant("c", (tile(0, 1, 0),))),
                [grant("b", ContainerGrant("c", (tile(0, 1, 100),)))],
                "",
                id="no-cores-reserved-overlap-nobody",
            ),
            pytest.param(
                grant("a", held(0, memory=20000)),
                [],
                "20000 MiB of memory of card 0 (GPU-0), which has 16384",
                id="more-memory-than-the-card-has",
            ),
            pytest.param(
                grant("a", ContainerGrant("c", (tile(0, 1, 101),))),
                [],
                "101 percent of the cores of card 0 (GPU-0), which has 100",
                id="more-cores",
            ),
            pytest.param(grant("a", held(0, memory=16384)), [], "", id="all-of-the-card"),
            pytest.param(
                grant("a", held(0), ContainerGrant("i", (tile(0, 16384),), Role.INIT)),
                [],
                "",
                id="init-and-app-take-turns",
            ),
        ],
    )
    def test_table(self, mine: Grant, others: list[Grant], says: str) -> None:
        found = overlap(mine.uses(), CardAllocations(others), BY_UUID)
        assert says in found if says else found == ""

    def test_a_card_that_is_not_here(self) -> None:
        assert "none of that name" in overlap(grant("a", held(0)).uses(), CardAllocations(), {})


class TestSlots:
    def test_a_name_is_never_used_twice(self) -> None:
        assert len({new_slot() for _ in range(1000)}) == 1000

    def test_ours_among_cdi_devices(self) -> None:
        assert slots_of([device_name("ab"), "nvidia.com/gpu=0"]) == ["ab"]

    def test_specs_go_with_their_pods_and_others_files_stay(self, tmp_path: Path) -> None:
        slots = CdiSpecStore(tmp_path)
        slots.fill("uid-a", "aa", {"env": []})
        slots.fill("uid-b", "bb", {"env": []})
        (tmp_path / "nvidia.yaml").write_text("kind: nvidia.com/gpu")
        (tmp_path / ".gputile.io-slot_uid-c_cc.json.1").write_text("half")
        assert (tmp_path / "gputile.io-slot_uid-a_aa.json").exists()
        assert slots.sweep({"uid-b"}) == 1
        assert sorted(path.name for path in tmp_path.iterdir()) == ["gputile.io-slot_uid-b_bb.json", "nvidia.yaml"]


class TestInventory:
    def test_what_the_driver_shows_becomes_cards(self) -> None:
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
            pytest.param([], None, id="none"),
        ],
    )
    def test_the_models_label(self, models: list[str], label: str | None) -> None:
        gpus = tuple(DriverGpu(index=n, uuid=str(n), model=model, memory=1) for n, model in enumerate(models))
        assert labels(DriverSnapshot(gpus=gpus), "none")["gputile.io/gpu-model"] == label

    @pytest.mark.parametrize(
        ("text", "value"), [("(A100)", "A100"), ("x" * 80, "x" * 63), ("--", None), ("Ä", None), ("12.4", "12.4")]
    )
    def test_labels_are_what_kubernetes_takes(self, text: str, value: str | None) -> None:
        assert label_value(text) == value


def entry(pod: str, *ids: str, container: str = "c0", cdi: tuple[str, ...] = ("gputile.io/slot=1",)) -> CheckpointEntry:
    return CheckpointEntry(pod=pod, container=container, resource=gputile.GPU, ids=frozenset(ids), cdi=cdi)


class TestTruth:
    @pytest.mark.parametrize(
        ("pods", "entries", "kinds", "elsewhere"),
        [
            pytest.param([granted("a", tile(0))], [entry("a", "GPU-0::1")], {}, 0, id="all-agree"),
            pytest.param([granted("a", tile(0))], [entry("a", "GPU-2::1")], {}, 1, id="devices-of-another-card"),
            pytest.param([ungranted("a")], [entry("a", "GPU-0::1")], {"ungranted": 1}, 0, id="no-grant"),
            pytest.param(
                [granted("a", tile(0))], [entry("a", "GPU-0::1", container="x")], {"unnamed": 1}, 0, id="no-container"
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
                id="sold-twice",
            ),
            pytest.param([granted("a", tile(0))], None, {"checkpoint": 1}, 0, id="no-checkpoint"),
        ],
    )
    async def test_table(
        self, pods: list[Pod], entries: list[CheckpointEntry] | None, kinds: dict[str, int], elsewhere: int
    ) -> None:
        node_pods = NodePods(DEFAULTS)
        await node_pods.serves(CARDS, "")
        await node_pods.listed(pods)
        found: Inconsistencies = compare(node_pods.all(), entries, {gputile.GPU: DEVICES}, BY_UUID)
        assert {kind: len(stories) for kind, stories in found.disagreements.items() if stories} == kinds
        assert found.elsewhere == elsewhere

    async def test_an_edited_grant_is_said(self) -> None:
        node_pods = NodePods(DEFAULTS)
        await node_pods.serves(CARDS, "")
        await node_pods.listed([granted("a", tile(0))])
        await node_pods.changed(granted("a", tile(1)), deleted=False)
        found = compare(node_pods.all(), [], {}, BY_UUID)
        assert len(found.disagreements["edited"]) == 1
