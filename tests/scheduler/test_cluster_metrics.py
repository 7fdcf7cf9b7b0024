"""Metrics of the cluster: every family and its values, and that the sums equal those of the ledger."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import Sample
from prometheus_client.parser import text_string_to_metric_families

from gputile.dialects.settings import DEFAULTS
from gputile.dialects.usage_annotation import USE, write_usage
from gputile.ledger.events import Confirmed, NodeSeen
from gputile.ledger.ledger import Ledger
from gputile.model.allocations import Allocation
from gputile.model.grants import ContainerGrant, Grant, Tile
from gputile.model.usage import CardUsage, Usage
from gputile.quota.limits import Limit, Quota
from gputile.scheduler.metrics.cluster_metrics import AT_ONCE, NOT_TRIED, ClusterMetrics
from gputile.scheduler.settings import MetricsSettings
from gputile.scheduler.state.cluster_state import ClusterState
from gputile.telemetry.exposition import FAMILIES, MIB
from gputile.telemetry.hami_metrics import HAMI_FAMILIES
from gputile.testing.builders import ask, node, wants
from tests.effort import examples
from tests.scheduler.rig import MEMORY, Clock, Rig, tile

GIB = 1024 * MIB


class Scrape:
    """What a scrape shows."""

    def __init__(self, text: bytes) -> None:
        families = list(text_string_to_metric_families(text.decode()))
        self.names = [family.name for family in families]
        self.samples: list[Sample] = [sample for family in families for sample in family.samples]

    def value(self, name: str, **labels: str) -> float | None:
        """The one sample that carries these labels; None when there is none."""
        values = [s.value for s in self.samples if s.name == f"gputile_{name}" and labels.items() <= s.labels.items()]
        assert len(values) < 2, values
        return values[0] if values else None

    def all(self, name: str) -> dict[tuple[str, ...], float]:
        return {tuple(s.labels.values()): s.value for s in self.samples if s.name in (name, f"gputile_{name}")}


async def scrape(rig: Rig | ClusterState, *, names_pods: bool = True, **settings: Any) -> Scrape:
    cluster_state = rig.cluster_state if isinstance(rig, Rig) else rig
    return Scrape(await ClusterMetrics(cluster_state, MetricsSettings(**settings)).text(names_pods=names_pods))


async def busy(**settings: Any) -> Rig:
    """n1 has two A100 and a T4 that failed; web-0 holds 4 GiB and 30 % of an A100, and n2 is empty."""
    nodes = (
        node("n1").cards(2, "A100", "16Gi").card("T4", "8Gi", healthy=False, reason="fell off the bus"),
        node("n2").card("A100", "16Gi", cordoned=True).card("A100", "16Gi", mode="mig").card("T4", "8Gi"),
        node("cpu"),
    )
    rig = Rig(*nodes, **settings)
    rig.api.nodes["n2"]["metadata"]["annotations"]["gputile.io/cordon"] = "GPU-n2-0"
    rig.api.add_node(rig.api.nodes["n2"])
    rig.catch_up()
    rig.arrive(tile(4096, 30))
    rig.filter(nodes=["n1"])
    assert await rig.bind() == ""
    rig.catch_up()
    return rig


def beat(rig: Rig, usage: Usage, *cards: str) -> None:
    for renewed in ("1", "2"):
        words = {USE: write_usage(usage, cards)}
        rig.api.add_lease("n1", words, holderIdentity="n1", leaseDurationSeconds=9, renewTime=renewed)
    rig.catch_up()


class TestCapacity:
    async def test_a_node(self) -> None:
        page = await scrape(await busy())
        assert page.value("node_memory_bytes", node="n1") == 40 * GIB
        assert page.value("node_memory_allocated_bytes", node="n1") == 4 * GIB
        assert page.value("node_cores_allocated_ratio", node="n1") == pytest.approx(0.1)
        assert page.value("node_idle_gpus", node="n1") == 1
        assert page.value("node_pods", node="n1") == 1
        assert page.value("node_free_gpus", node="n1") == pytest.approx(1.7, abs=0.01)
        assert page.value("node_memory_used_bytes", node="n1") is None

    async def test_a_node_without_cards_is_not_shown(self) -> None:
        assert not [s for s in (await scrape(await busy())).samples if s.labels.get("node") == "cpu"]

    async def test_cards_by_state(self) -> None:
        page = await scrape(await busy())
        assert page.all("node_gpus") == {
            ("n1", "A100", "usable"): 2,
            ("n1", "T4", "unhealthy"): 1,
            ("n2", "A100", "cordoned"): 1,
            ("n2", "A100", "mig"): 1,
            ("n2", "T4", "usable"): 1,
        }
        assert page.all("model_gpus") == {
            ("A100", "cordoned"): 1,
            ("A100", "mig"): 1,
            ("A100", "usable"): 2,
            ("T4", "unhealthy"): 1,
            ("T4", "usable"): 1,
        }

    async def test_models(self) -> None:
        page = await scrape(await busy())
        assert page.all("model_memory_bytes") == {("A100",): 64 * GIB, ("T4",): 16 * GIB}
        assert page.all("model_memory_allocated_bytes") == {("A100",): 4 * GIB, ("T4",): 0}
        assert page.all("model_cores_allocated_ratio") == {("A100",): pytest.approx(0.3 / 4), ("T4",): 0}
        assert page.all("model_idle_gpus") == {("A100",): 1, ("T4",): 1}

    async def test_a_card(self) -> None:
        rig = await busy()
        page, uuid = await scrape(rig), holds(rig)
        assert page.value("gpu_memory_bytes", uuid=uuid, node="n1", model="A100") == 16 * GIB
        assert page.value("gpu_memory_allocated_bytes", uuid=uuid) == 4 * GIB
        assert page.value("gpu_cores_allocated_ratio", uuid=uuid) == 0.3
        assert page.value("gpu_pods", uuid=uuid) == 1
        assert page.value("gpu_usable", uuid=uuid) == 1
        assert page.value("gpu_usable", uuid="GPU-n1-2") == 0
        assert page.value("gpu_memory_used_bytes", uuid=uuid) is None

    async def test_a_pod_and_its_container(self) -> None:
        page = await scrape(await busy())
        mine = {"namespace": "default", "pod": "web-0", "uid": "uid-web-0", "node": "n1"}
        assert page.value("pod_memory_allocated_bytes", **mine) == 4 * GIB
        assert page.value("pod_cores_allocated_ratio", **mine) == 0.3
        assert page.value("container_memory_allocated_bytes", **mine, container="c0") == 4 * GIB
        assert page.value("container_cores_allocated_ratio", **mine, container="c0") == 0.3
        assert page.value("container_memory_used_bytes", **mine) is None

    async def test_a_reservation_is_allocated_memory_and_not_a_pod(self) -> None:
        rig = Rig(node("n1").card("A100", "16Gi"))
        rig.arrive(tile(4096))
        rig.filter()
        page = await scrape(rig)
        assert page.value("node_memory_allocated_bytes", node="n1") == 4 * GIB
        assert page.value("node_pods", node="n1") == 0
        assert page.value("pod_memory_allocated_bytes") is None

    async def test_health(self) -> None:
        rig = await busy()
        assert (await scrape(rig)).value("node_agent_alive", node="n1") is None
        beat(rig, {})
        assert (await scrape(rig)).value("node_agent_alive", node="n1") == 1
        rig.wait(11)
        page = await scrape(rig)
        assert page.value("node_agent_alive", node="n1") == 0
        assert page.value("node_fault", node="n1", code="AgentStale") == 1
        assert page.value("node_gpus", node="n1", state="node out of use") == 2


class TestFragmentation:
    async def test_what_no_pod_so_far_could_use(self) -> None:
        """Pods want halves of a card; three cards have a third left each."""
        rig = Rig(node("n0").card("A100", "30Gi"), node("n1").cards(4, "A100", "30Gi"))
        rig.ledger.fleet.scorer.learn_all([wants(ask(15 * 1024))])
        for number in range(3):
            rig.arrive(tile(20 * 1024), name=f"p{number}")
            rig.filter(f"p{number}", nodes=["n1"])
            assert await rig.bind(f"p{number}") == ""
        page = await scrape(rig)
        assert page.value("free_gpus") == pytest.approx(3, abs=0.01)
        assert page.value("fragmented_gpus") == pytest.approx(1, abs=0.01)
        assert page.all("node_fragmented_gpus") == {("n0",): 0, ("n1",): page.value("fragmented_gpus")}
        assert page.value("fragmented_gpus") == pytest.approx(rig.ledger.fleet.fragmentation())


class TestUse:
    async def test_of_containers_cards_and_the_node(self) -> None:
        rig = await busy()
        uuid = holds(rig)
        beat(rig, {"uid-web-0": {"c0": {uuid: CardUsage(3000, 40)}}}, "GPU-n1-0", "GPU-n1-1", "GPU-n1-2")
        page = await scrape(rig)
        assert page.value("container_memory_used_bytes", container="c0", uuid=uuid) == 3000 * MIB
        assert page.value("container_cores_used_ratio", container="c0", uuid=uuid) == 0.4
        assert page.value("gpu_memory_used_bytes", uuid=uuid) == 3000 * MIB
        assert page.value("gpu_cores_used_ratio", uuid=uuid) == 0.4
        assert page.value("gpu_memory_used_bytes", uuid="GPU-n1-2") == 0
        assert page.value("node_memory_used_bytes", node="n1") == 3000 * MIB

    async def test_an_unknown_value_is_absent_and_so_are_its_sums(self) -> None:
        rig = await busy()
        uuid = holds(rig)
        beat(rig, {"uid-web-0": {"c0": {uuid: CardUsage(None, 40)}}}, uuid)
        page = await scrape(rig)
        assert page.value("container_memory_used_bytes") is None
        assert page.value("container_cores_used_ratio") == 0.4
        assert page.all("gpu_memory_used_bytes") == {}
        assert page.value("node_memory_used_bytes", node="n1") is None

    async def test_a_card_that_was_not_granted_and_an_unknown_container(self) -> None:
        rig = await busy()
        beat(
            rig,
            {"uid-web-0": {"": {"GPU-n1-2": CardUsage(7)}}, "uid-other": {"x": {"GPU-n1-2": CardUsage(9)}}},
            "GPU-n1-2",
        )
        page = await scrape(rig)
        assert page.all("container_memory_used_bytes") == {
            ("default", "web-0", "uid-web-0", "", "n1", "GPU-n1-2"): 7 * MIB
        }
        assert page.value("gpu_memory_used_bytes", uuid="GPU-n1-2") == 16 * MIB


class TestPendingPods:
    async def test_by_namespace_and_reason(self) -> None:
        rig = Rig(node("n1").card("A100", "16Gi"), node("cpu"), node("cpu2"))
        rig.arrive(tile(99999), name="big")
        rig.filter("big")
        rig.arrive(tile(1), name="new")
        rig.arrive({MEMORY: 1}, name="bad")
        rig.filter("bad")
        assert (await scrape(rig)).all("pending_pods") == {
            ("default", "CardTooSmall"): 1,
            ("default", NOT_TRIED): 1,
            ("default", "NoDeviceResource"): 1,
        }

    async def test_a_deleted_pod_leaves_no_reason_behind(self) -> None:
        rig = Rig(node("n1").card("A100", "16Gi"))
        rig.arrive(tile(99999), name="big")
        rig.filter("big")
        rig.api.delete_pod("default/big")
        rig.catch_up()
        assert (await scrape(rig)).all("pending_pods") == {}
        assert rig.cluster_state.main_reasons == {}


class TestWhatIsLeftOut:
    async def test_nothing_in_a_small_cluster(self) -> None:
        assert (await scrape(await busy())).all("series_omitted") == {("cards",): 0, ("pods",): 0}

    async def test_cards_and_pods_beyond_the_settings(self) -> None:
        page = await scrape(await busy(), cards=5, pods=0, hami=True)
        assert page.all("series_omitted") == {("cards",): 6, ("pods",): 1}
        assert not [s for s in page.samples if "uuid" in s.labels or "device_uuid" in s.labels or "pod" in s.labels]
        assert page.value("node_memory_bytes", node="n1") == 40 * GIB

    async def test_a_client_without_the_right_to_pods_sees_neither_names_nor_namespaces(self) -> None:
        rig = await busy()
        rig.arrive(tile(99999), name="big")
        page = await scrape(rig, names_pods=False, hami=True)
        assert not [s for s in page.samples if s.labels.get("namespace") or "pod" in s.labels]
        assert page.value("pending_pods", reason=NOT_TRIED) == 1
        assert page.value("series_omitted", kind="pods") == 1
        assert page.value("gpu_usable", uuid="GPU-n1-0") == 1


class TestHami:
    async def test_off_unless_asked_for(self) -> None:
        assert not [name for name in (await scrape(await busy())).names if name.startswith("hami")]

    async def test_cards_and_containers_in_its_units(self) -> None:
        rig = await busy()
        uuid = holds(rig)
        page = await scrape(rig, hami=True)
        card = ("vGPU", "n1", uuid, uuid[-1])
        assert page.all("hami_gpu_memory_limit_bytes")[*card, "NVIDIA-A100"] == 16 * GIB
        assert page.all("hami_gpu_core_limit_ratio")[*card, "NVIDIA-A100"] == 100
        assert page.all("hami_gpu_memory_allocated_bytes")[*card, "100", "NVIDIA-A100"] == 4 * GIB
        assert page.all("hami_gpu_core_allocated_ratio")[*card, "NVIDIA-A100"] == 30
        assert page.all("hami_gpu_shared_count")[*card, "NVIDIA-A100"] == 1
        assert page.all("hami_node_gpu_overview")[*card, "100", "16384", "NVIDIA-A100"] == 4 * GIB
        assert page.all("hami_node_gpu_memory_allocated_ratio")[card] == 0.25
        held = ("vGPU", "default", "n1", "web-0", "0", uuid)
        assert page.all("hami_vgpu_memory_allocated_bytes") == {held: 4 * GIB}
        assert page.all("hami_vgpu_core_allocated_ratio") == {held: 30}


async def test_labels_are_those_of_the_families_and_every_family_has_a_series() -> None:
    rig = await busy()
    uuid = holds(rig)
    beat(rig, {"uid-web-0": {"c0": {uuid: CardUsage(3000, 40)}}}, "GPU-n1-0", "GPU-n1-1", "GPU-n1-2")
    rig.arrive(tile(1), name="waits")
    broken = node("n3").card().facts(fault="PluginGone").node()
    rig.ledger.handle(NodeSeen(broken))
    rig.ledger.quota_usage.set({"default": Quota((Limit(model="*", cards=800),))}, [])
    page = await scrape(rig, hami=True)
    seen = {sample.name: tuple(sample.labels) for sample in page.samples}
    assert seen == {family.name: family.labels for family in (*FAMILIES, *HAMI_FAMILIES)}


async def test_no_series_is_shown_twice_also_for_two_pods_of_one_name() -> None:
    """A pod that was deleted by force and runs on, and its successor, each with two tiles of one card."""
    ledger = Ledger()
    ledger.handle(NodeSeen(node("n1").card("A100", "80Gi").node()))
    part = Tile("GPU-n1-0", 0, 1024, 10)
    for uid in ("old", "new"):
        grant = Grant(pod=uid, node="n1", dialect="nano", containers=(ContainerGrant("c0", (part, part)),))
        ledger.handle(Confirmed(Allocation(pod=uid, node="n1", name="default/db-0", grant=grant)))
    page = await scrape(ClusterState(ledger, DEFAULTS), hami=True)
    series = Counter((s.name, tuple(s.labels.items())) for s in page.samples)
    assert max(series.values()) == 1
    assert set(page.all("container_memory_allocated_bytes").values()) == {2 * GIB}
    assert set(page.all("hami_vgpu_memory_allocated_bytes").values()) == {4 * GIB}


async def test_strange_models_do_not_break_the_page() -> None:
    rig = Rig(node("n1").card('A "new\\ model"\nx', "16Gi"))
    assert (await scrape(rig)).all("model_gpus") == {('A "new\\ model"\nx', "usable"): 1}


def holds(rig: Rig) -> str:
    """The card of web-0."""
    entry = rig.ledger.entry("uid-web-0")
    assert entry is not None
    (uuid,) = entry.allocation.uses()
    return uuid


async def test_other_tasks_run_in_between() -> None:
    rig = Rig(*(node(f"n{n}").card() for n in range(200)))
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await ClusterMetrics(rig.cluster_state, MetricsSettings()).text()
    counting.cancel()
    assert turns >= 200 // AT_ONCE + len(FAMILIES)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 4000), st.integers(0, 20)), max_size=20))
@examples(50)
def test_nodes_models_cards_and_pods_add_up_to_the_same(
    held: list[tuple[int, int, int, int]],
) -> None:
    ledger = Ledger()
    for n in range(3):
        ledger.handle(NodeSeen(node(f"n{n}").cards(4, f"model-{n % 2}", "80Gi").node()))
    for number, (n, card, memory, cores) in enumerate(held):
        part = Tile(f"GPU-n{n}-{card}", card, memory, cores)
        grant = Grant(pod=f"uid-{number}", node=f"n{n}", dialect="gputile", containers=(ContainerGrant("c", (part,)),))
        ledger.handle(Confirmed(Allocation(pod=f"uid-{number}", node=f"n{n}", name=f"default/p{number}", grant=grant)))
    page = asyncio.run(scrape(ClusterState(ledger, DEFAULTS, clock=Clock())))
    kinds = ("node", "model", "gpu", "pod", "container")
    sums = [sum(page.all(f"{kind}_memory_allocated_bytes").values()) for kind in kinds]
    assert sums == [sum(memory for _, _, memory, _ in held) * MIB] * len(kinds)
    assert sum(page.all("node_pods").values()) == len(held)
    assert page.value("free_gpus") == pytest.approx(sum(page.all("node_free_gpus").values()))


# ---- many at once ---------------------------------------------------------------------------------------------------


async def test_simultaneous_scrapes_share_one_page() -> None:
    cluster_metrics = ClusterMetrics((await busy()).cluster_state, MetricsSettings())
    first, second, anonymous = await asyncio.gather(
        cluster_metrics.text(), cluster_metrics.text(), cluster_metrics.text(names_pods=False)
    )
    assert first is second
    assert b"web-0" in first
    assert b"web-0" not in anonymous, "clients with and without the right to pods never share"
    assert await cluster_metrics.text() is not first, "the next scrape is fresh"


async def test_a_cancelled_scrape_does_not_cancel_the_others() -> None:
    cluster_metrics = ClusterMetrics((await busy()).cluster_state, MetricsSettings())
    first, second = asyncio.create_task(cluster_metrics.text()), asyncio.create_task(cluster_metrics.text())
    await asyncio.sleep(0)
    first.cancel()
    assert b"web-0" in await second
