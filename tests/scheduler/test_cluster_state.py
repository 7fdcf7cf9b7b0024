"""From the watches to the ledger: which pods count, from when until when, and which grants are valid."""

from typing import Any

import msgspec
import pytest

from gputile.dialects import gputile
from gputile.dialects.gputile import GRANT
from gputile.dialects.kube_objects import NodeInventory, NodeObject, Pod
from gputile.dialects.settings import DialectSettings
from gputile.kube.api import Json
from gputile.ledger.events import Conflict, Freed
from gputile.ledger.ledger import AllocationState, Ledger
from gputile.model.requests import PodRequest
from gputile.scheduler.state.cluster_state import ClusterState
from gputile.testing.builders import node, pod
from tests.dialects.shortcuts import raw_node
from tests.scheduler.rig import Rig, tile

CARDS = node("n1").cards(2, "V100", "32Gi")
NOW = "2026-08-01T00:00:00Z"


def grant(memory: int = 8, index: int = 0, *, name: str = "web-0", on: str = "n1", **changes: Any) -> dict[str, str]:
    """The annotation of a pod that we bound."""
    card = {"uuid": f"GPU-{on}-{index}", "index": index, "memory": memory, "cores": 0}
    document = {
        "version": 1,
        "pod": f"uid-{name}",
        "node": on,
        "dialect": "gputile",
        "containers": [{"name": "c0", "tiles": [card]}],
        **changes,
    }
    return {GRANT: msgspec.json.encode(document).decode()}


def small(*pods: Json) -> Rig:
    return Rig(node("n1").cards(2, size=16), node("n2").cards(2, size=16), pods=pods)


class TestCountedUntilGone:
    @pytest.mark.parametrize(
        ("change", "free"),
        [
            pytest.param({"status": {"phase": "Running"}}, [8, 16], id="running"),
            pytest.param({"metadata": {"deletionTimestamp": NOW}}, [8, 16], id="terminating-is-not-gone"),
            pytest.param({"status": {"phase": "Unknown"}}, [8, 16], id="on-a-node-that-is-unreachable"),
            pytest.param({"status": {"phase": "Succeeded"}}, [16, 16], id="completed"),
            pytest.param({"status": {"phase": "Failed"}}, [16, 16], id="failed"),
        ],
    )
    def test_by_its_phase(self, change: Json, free: list[int]) -> None:
        rig = small()
        rig.arrive(tile(8), annotations=grant(), on="n1")
        assert rig.free() == [8, 16]
        if "metadata" in change:
            change = {"metadata": rig.live()["metadata"] | change["metadata"]}
        rig.change("web-0", **change)
        done = rig.catch_up()
        assert rig.free() == free
        assert (Freed("n1") in done) == (free == [16, 16])
        rig.relist()
        assert rig.free() == free, "a list changes nothing"

    def test_deleted(self) -> None:
        rig = small()
        rig.arrive(tile(8), annotations=grant(), on="n1")
        rig.api.delete_pod("default/web-0")
        assert Freed("n1") in rig.catch_up()
        assert rig.free() == [16, 16]
        assert rig.cluster_state.pod("uid-web-0") is None

    def test_a_pod_without_gpus_counts_with_its_cpu_and_memory(self) -> None:
        rig = small()
        rig.arrive({"cpu": "2", "memory": "1Gi"}, on="n1")
        view = rig.ledger.fleet.view("n1")
        assert (view.cpu, view.memory) == (62000, 511 * 1024)
        assert not rig.cluster_state.ungranted
        assert not rig.cluster_state.pending

    def test_a_completed_pod_in_a_list_is_not_counted(self) -> None:
        completed = pod(tile(8), annotations=grant(), uid="uid-web-0", on="n1") | {"status": {"phase": "Succeeded"}}
        assert small(completed).free() == [16, 16]


class TestPending:
    def test_a_pod_without_a_node_is_pending_and_holds_nothing(self) -> None:
        rig = small()
        rig.arrive(tile(8))
        assert isinstance(rig.cluster_state.pending["uid-web-0"].request, PodRequest)
        assert rig.state() is None

    def test_a_pod_without_gpus_is_ignored(self) -> None:
        rig = small()
        rig.arrive({"cpu": 1})
        assert rig.cluster_state.pending == {}

    def test_a_changed_pod_is_parsed_again(self) -> None:
        rig = small()
        rig.arrive(tile(8))
        rig.api.add_pod(pod(tile(4), uid="uid-web-0", annotations={"gputile.io/model": "T4"}))
        rig.catch_up()
        request = rig.cluster_state.pending["uid-web-0"].request
        assert isinstance(request, PodRequest)
        assert request.asks[0].memory == 4
        assert request.constraints.models != ()

    def test_a_changed_status_is_kept_without_parsing_again(self) -> None:
        rig = small()
        rig.arrive(tile(8))
        before = rig.cluster_state.pending["uid-web-0"].request
        rig.change("web-0", status={"nominatedNodeName": "n2"})
        rig.catch_up()
        now = rig.cluster_state.pending["uid-web-0"]
        assert now.request is before
        assert now.pod.status is not None
        assert now.pod.status.nominated_node_name == "n2"

    def test_each_arrival_is_returned_once(self) -> None:
        rig = small(pod(tile(8), name="a", uid="uid-a"))
        assert len(rig.cluster_state.take_arrivals()) == 1
        assert rig.cluster_state.take_arrivals() == []
        rig.arrive(tile(8), name="b")
        rig.change("b", status={"phase": "Pending"})
        rig.catch_up()
        assert len(rig.cluster_state.take_arrivals()) == 1
        rig.relist()
        assert rig.cluster_state.take_arrivals() == []

    def test_it_is_no_longer_pending_once_bound_or_gone(self) -> None:
        rig = small()
        rig.arrive(tile(8), name="a")
        rig.arrive(tile(8), name="b")
        rig.api.delete_pod("default/a")
        rig.change("b", spec={"nodeName": "n1"})
        rig.catch_up()
        assert rig.cluster_state.pending == {}

    def test_gpushares_unit_is_guessed_for_pods_seen_before_the_node(self) -> None:
        cluster_state = ClusterState(Ledger(), DialectSettings(gpushare_unit="auto"))
        cluster_state.pods_listed([msgspec.convert(pod({"aliyun.com/gpu-mem": 3000}, uid="u"), Pod)])
        counts = raw_node({"aliyun.com/gpu-mem": 2 * 16000, "aliyun.com/gpu-count": 2})
        cluster_state.node_changed(msgspec.convert(counts, NodeObject))
        assert cluster_state.settings.gpushare_unit == "MiB"
        request = cluster_state.pending["u"].request
        assert isinstance(request, PodRequest)
        assert request.asks[0].memory == 3000


class TestBoundByAnotherScheduler:
    def test_without_a_record_it_is_ungranted(self) -> None:
        rig = small()
        rig.arrive(tile(8), on="n1")
        assert list(rig.cluster_state.ungranted) == ["uid-web-0"]
        assert (rig.state(), rig.free()) == (AllocationState.CONFIRMED, [16, 16])
        rig.relist()
        assert list(rig.cluster_state.ungranted) == ["uid-web-0"]

    def test_after_its_deletion_it_needs_no_grant(self) -> None:
        rig = small()
        rig.arrive(tile(8), on="n1")
        rig.api.delete_pod("default/web-0")
        rig.catch_up()
        assert rig.cluster_state.ungranted == {}

    async def test_the_leaders_grant_is_confirmed_before_the_cluster_shows_it(self) -> None:
        rig = small()
        rig.arrive(tile(8), on="n1")
        await rig.reconciler.round()
        assert rig.free() == [8, 16]
        assert rig.cluster_state.ungranted == {}
        rig.change("web-0", status={"phase": "Running"})
        rig.api.events.pop(0)  # the patch is not shown yet; the status is
        rig.catch_up()
        assert rig.free() == [8, 16]
        assert rig.cluster_state.ungranted == {}

    async def test_also_on_the_node_where_it_was_reserved(self) -> None:
        """kube-scheduler may bind by itself (`ignorable: true`), to the node that filter returned."""
        rig = small()
        rig.arrive(tile(8))
        rig.filter(nodes=["n1"])
        rig.change("web-0", spec={"nodeName": "n1"})
        rig.catch_up()
        await rig.reconciler.round()
        assert rig.written() is not None

    def test_on_an_unknown_node_it_stays_ungranted_until_the_node_is_known(self) -> None:
        rig = small()
        rig.arrive(tile(8), on="later", annotations=grant(on="later"))
        rig.api.add_node(node("later").cards(1, size=16).manifest())
        rig.catch_up()
        assert rig.free("later") == [8]


FOREIGN = [
    pytest.param({"aliyun.com/gpu-mem": 3}, {"ALIYUN_COM_GPU_MEM_IDX": "1"}, (1, 3072, 0), id="gpushare"),
    pytest.param(
        {"aliyun.com/gpu-mem": 3},
        {"scheduler.framework.gpushare.allocation": '{"0":{"1":3}}'},
        (1, 3072, 0),
        id="gpushare-2.0",
    ),
    pytest.param(
        {"nano-gpu.io/gpu-core": 20, "nano-gpu.io/gpu-memory": 1},
        {"nano-gpu.io/gpu": "true", "nano-gpu.io/gpu-c0": "1"},
        (1, 1024, 20),
        id="nano-generation-1",
    ),
    pytest.param(
        {"elasticgpu.io/gpu-core": 20, "elasticgpu.io/gpu-memory": 1024},
        {"elasticgpu.io/assumed": "true", "elasticgpu.io/container-c0": "1"},
        (1, 1024, 20),
        id="nano-generation-3",
    ),
    pytest.param(
        {"tencent.com/vcuda-core": 20, "tencent.com/vcuda-memory": 4},
        {"tencent.com/predicate-gpu-idx-0": "1", "tencent.com/gpu-assigned": "true"},
        (1, 1024, 20),
        id="vcuda",
    ),
    pytest.param(
        {"nvidia.com/vcuda-core": 20, "nvidia.com/vcuda-memory": 1024},
        {"nvidia.com/predicate-gpu-idx-0": "1"},
        (1, 1024, 20),
        id="the-fork-of-vcuda",
    ),
    pytest.param(
        {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000, "nvidia.com/gpucores": 30},
        {"hami.io/vgpu-devices-allocated": "GPU-n1-1,NVIDIA,3000,30:;"},
        (1, 3000, 30),
        id="hami",
    ),
    pytest.param(
        {"nvidia.com/gpu": 1},
        {"hami.io/vgpu-devices-allocated": "GPU-n1-1,NVIDIA,32768,0:;"},
        (1, 32768, 0),
        id="hami-serving-a-pod-that-requests-whole-cards",
    ),
    pytest.param(
        {"nvidia.com/vgpu-number": 1, "nvidia.com/vgpu-memory": 9},
        {"nvidia.com/real-allocated": "c0[1_GPU-n1-1_30_9]"},
        (1, 9, 30),
        id="vgpu-manager",
    ),
]


class TestOtherDialects:
    @pytest.mark.parametrize(("limits", "annotations", "held"), FOREIGN)
    @pytest.mark.parametrize("listed", [True, False], ids=["in-the-first-list", "later"])
    def test_their_records_count(
        self, limits: Json, annotations: dict[str, str], held: tuple[int, int, int], listed: bool
    ) -> None:
        manifest = pod(limits, uid="uid-web-0", annotations=annotations, on="n1")
        rig = Rig(CARDS, pods=[manifest] if listed else [])
        if not listed:
            rig.arrive(limits, annotations=annotations, on="n1")
        assert self.held(rig) == held
        assert not rig.cluster_state.ungranted
        assert not rig.cluster_state.invalid_grants

    @pytest.mark.parametrize(("limits", "annotations", "held"), FOREIGN)
    def test_also_when_the_inventory_comes_later_than_the_pod(
        self, limits: Json, annotations: dict[str, str], held: tuple[int, int, int]
    ) -> None:
        rig = Rig(node("n1"))
        rig.arrive(limits, annotations=annotations, on="n1")
        rig.api.add_node(CARDS.manifest())
        rig.catch_up()
        assert self.held(rig) == held
        assert rig.cluster_state.ungranted == {}

    @staticmethod
    def held(rig: Rig) -> tuple[int, int, int]:
        """Which card, and how much of it."""
        (index,) = (n for n, free in enumerate(rig.ledger.fleet.view("n1").free_by_card) if free.tenants)
        free = rig.ledger.fleet.view("n1").free_by_card[index]
        rig.ledger.check()
        return index, 32768 - free.memory, 100 - free.cores

    def test_a_record_by_index_follows_when_the_nodes_cards_get_their_names(self) -> None:
        """gpushare's plugin names no cards; our agent, which replaces it, does."""
        counts = raw_node({"aliyun.com/gpu-mem": 32, "aliyun.com/gpu-count": 2})
        rig = Rig(counts)
        rig.arrive({"aliyun.com/gpu-mem": 3}, annotations={"ALIYUN_COM_GPU_MEM_IDX": "1"}, on="n1")
        assert rig.free() == [16384, 16384 - 3072]
        assert rig.cluster_state.guessing == {"n1"}
        rig.api.add_node(CARDS.manifest())
        rig.catch_up()
        assert rig.free() == [32768, 32768 - 3072]
        assert rig.cluster_state.guessing == set()
        rig.ledger.check()


class TestWhichGrantsAreValid:
    @pytest.mark.parametrize(
        ("annotations", "why"),
        [
            pytest.param(grant(pod="uid-other"), "belongs to pod uid-other on node n1", id="of-another-pod"),
            pytest.param(grant(node="n2"), "belongs to pod uid-web-0 on node n2", id="of-another-node"),
            pytest.param({GRANT: "{"}, "cannot be read", id="broken"),
            pytest.param(grant(version=9), "update gputile", id="of-a-later-version"),
            pytest.param(grant(2**30), "more than any GPU has", id="of-more-than-any-card-has"),
        ],
    )
    def test_a_copied_grant_is_reported_and_allocates_nothing(self, annotations: dict[str, str], why: str) -> None:
        rig = small()
        rig.arrive(tile(8), annotations=annotations, on="n1")
        assert rig.free() == [16, 16]
        assert why in rig.cluster_state.invalid_grants["uid-web-0"][1]
        assert list(rig.cluster_state.ungranted) == ["uid-web-0"], "it gets a grant of its own"

    @pytest.mark.parametrize(
        "annotations",
        [
            pytest.param(grant(index=1), id="moved-to-another-card"),
            pytest.param(grant(1), id="reduced"),
            pytest.param(grant(pod="uid-other"), id="replaced-by-another-pods"),
            pytest.param({GRANT: "{"}, id="broken"),
        ],
    )
    def test_an_edit_changes_nothing_and_is_reported(self, annotations: dict[str, str]) -> None:
        rig = small()
        rig.arrive(tile(8), annotations=grant(), on="n1")
        rig.arrive(tile(8), annotations=annotations, on="n1")
        assert rig.free() == [8, 16]
        assert GRANT in rig.cluster_state.invalid_grants["uid-web-0"][1]
        rig.relist()
        assert rig.free() == [8, 16]

    @pytest.mark.parametrize(
        "annotations",
        [
            pytest.param(grant(index=1), id="moved-to-another-card"),
            pytest.param(grant(1), id="reduced"),
            pytest.param(grant(pod="uid-other"), id="replaced-by-another-pods"),
            pytest.param({GRANT: "{"}, id="broken"),
        ],
    )
    async def test_the_valid_grant_is_written_back_for_the_next_process(self, annotations: Json) -> None:
        rig = small()
        rig.arrive(tile(8), annotations=grant(), on="n1")
        rig.arrive(tile(8), annotations=annotations, on="n1")
        await rig.reconciler.round()
        rig.catch_up()
        after = small(*rig.api.pods.values())
        assert after.free() == [8, 16]

    async def test_a_removed_grant_is_restored(self) -> None:
        """Otherwise the next process would grant the pod other cards than the ones it runs on."""
        rig = small()
        rig.arrive(tile(8), annotations=grant(index=1), on="n1")
        rig.arrive(tile(8), on="n1")
        assert rig.free() == [16, 8]
        await rig.reconciler.round()
        written = rig.written()
        assert written is not None
        assert written["containers"][0]["tiles"][0]["index"] == 1

    def test_what_the_cluster_shows_wins_over_a_bind_that_was_never_written(self) -> None:
        """Assumed here on card 0; the cluster shows it on card 1, by another leader of ours."""
        rig = small()
        rig.arrive(tile(8))
        rig.filter(nodes=["n1"])
        rig.arrive(tile(8), annotations=grant(index=1), on="n1")
        assert (rig.state(), rig.free()) == (AllocationState.CONFIRMED, [16, 8])
        assert rig.cluster_state.invalid_grants == {}

    def test_an_overcommitted_card_is_a_conflict(self) -> None:
        rig = small()
        rig.arrive(tile(10), name="a", annotations=grant(10, name="a"), on="n1")
        rig.arrive(tile(10), name="b", annotations=grant(10, name="b"), on="n1", seen=False)
        assert Conflict("uid-b", "n1", ("GPU-n1-0",)) in rig.catch_up()
        assert rig.count("overcommits_total") == 1


class TestRelisting:
    def test_a_relist_corrects_missed_deletions_and_missed_binds(self) -> None:
        rig = small()
        rig.arrive(tile(8), name="a", annotations=grant(name="a"), on="n1")
        rig.arrive(tile(8), name="b")
        rig.arrive(tile(8), name="c")
        rig.api.delete_pod("default/a")
        rig.api.delete_pod("default/c")
        rig.api.add_pod(pod(tile(8), name="b", uid="uid-b", annotations=grant(name="b", index=1), on="n1"))
        rig.relist()
        assert rig.free() == [16, 8]
        assert rig.cluster_state.pending == {}
        assert rig.cluster_state.pod("uid-a") is None
        rig.ledger.check()

    @pytest.mark.parametrize("annotations", [grant(), {}], ids=["granted", "ungranted"])
    async def test_a_relist_corrects_a_missed_end(self, annotations: dict[str, str]) -> None:
        """Otherwise an agent that takes one pod at a time is busy forever, and an ended pod is granted cards."""
        rig = small()
        rig.arrive(tile(8), annotations=annotations, on="n1")
        rig.change("web-0", status={"phase": "Succeeded"})
        rig.relist()
        assert rig.cluster_state.pod("uid-web-0") is None
        assert rig.cluster_state.starting("n1") is None
        await rig.reconciler.round()
        assert rig.free() == [16, 16]

    def test_a_relist_corrects_the_missed_end_of_a_pending_pod(self) -> None:
        rig = small()
        rig.arrive(tile(8))
        rig.change("web-0", status={"phase": "Failed"})
        rig.relist()
        assert rig.cluster_state.pending == {}

    async def test_a_relist_keeps_a_bind_that_it_may_not_have_seen(self) -> None:
        rig = small()
        rig.arrive(tile(8))
        before = dict(rig.live())
        await rig.bind()
        rig.cluster_state.pods_listed([msgspec.convert(before | {"spec": {**before["spec"], "nodeName": None}}, Pod)])
        assert (rig.state(), rig.free()) == (AllocationState.ASSUMED, [8, 16])

    def test_a_stale_event_after_a_live_lookup_does_no_harm(self) -> None:
        """A live lookup is faster than the watch, which then shows the pod as it was before it was bound."""
        rig = small()
        rig.arrive(tile(8))
        old = rig.cluster_state.pending["uid-web-0"].pod
        rig.arrive(tile(8), annotations=grant(), on="n1")
        rig.cluster_state.pod_changed(old)
        assert (rig.state(), rig.free()) == (AllocationState.CONFIRMED, [8, 16])
        assert rig.filter().names == ["n1"]
        rig.relist()
        assert (rig.state(), rig.free(), rig.cluster_state.pending) == (AllocationState.CONFIRMED, [8, 16], {})

    def test_the_same_event_twice_changes_nothing(self) -> None:
        rig = small()
        rig.arrive(tile(8), annotations=grant(), on="n1")
        again = msgspec.convert(rig.live(), Pod)
        assert rig.cluster_state.pod_changed(again) == []
        assert rig.cluster_state.pod_changed(again, deleted=True) == [Freed("n1")]
        assert rig.cluster_state.pod_changed(again, deleted=True) == []
        assert rig.free() == [16, 16]

    def test_a_pod_of_the_same_name_is_another_pod(self) -> None:
        rig = small()
        rig.arrive(tile(8), annotations=grant(), on="n1")
        rig.api.delete_pod("default/web-0")
        rig.api.add_pod(pod(tile(8), uid="uid-new"))
        rig.catch_up()
        assert rig.free() == [16, 16]
        assert list(rig.cluster_state.pending) == ["uid-new"]


class TestNodes:
    def test_a_listed_node_is_known_and_a_missing_node_is_gone(self) -> None:
        rig = small()
        assert sorted(rig.ledger.fleet.names()) == ["n1", "n2"]
        rig.cluster_state.nodes_listed([msgspec.convert(rig.api.nodes["n2"], NodeObject)])
        assert sorted(rig.ledger.fleet.names()) == ["n2"]

    def test_a_node_that_comes_back_holds_what_its_pods_hold(self) -> None:
        rig = small()
        rig.arrive(tile(8), annotations=grant(), on="n1")
        back = rig.api.nodes["n1"]
        rig.api.delete_node("n1")
        rig.catch_up()
        assert "n1" not in rig.ledger.fleet
        rig.api.add_node(back)
        assert Freed("n1") in rig.catch_up()
        assert rig.free() == [8, 16]

    def test_a_node_with_an_undecodable_inventory_is_known_and_faulty(self) -> None:
        rig = small()
        broken = node("n1").manifest()
        broken["metadata"]["annotations"]["gputile.io/inventory"] = "{"
        rig.api.add_node(broken)
        rig.catch_up()
        rig.arrive(tile(8))
        assert rig.filter(nodes=["n1"]).unresolvable == {"n1": "node(s) have an unreadable GPU inventory"}

    @pytest.mark.parametrize(
        ("capacity", "guesses"),
        [
            pytest.param({"aliyun.com/gpu-mem": 32, "aliyun.com/gpu-count": 2}, True, id="gpushare"),
            pytest.param({"tencent.com/vcuda-core": 200, "tencent.com/vcuda-memory": 64}, True, id="vcuda"),
            pytest.param({"nano-gpu.io/gpu-core": 200, "nano-gpu.io/gpu-memory": 64}, False, id="nano-does-not-guess"),
            pytest.param({"nvidia.com/gpu": 2}, False, id="nvidia-does-not-guess"),
            pytest.param({"cpu": 2}, False, id="no-agent"),
        ],
    )
    def test_which_agents_guess(self, capacity: Json, guesses: bool) -> None:
        assert Rig(raw_node(capacity)).cluster_state.guessing == ({"n1"} if guesses else set())

    def test_our_own_agent_guesses_where_the_runtime_lacks_cdi(self) -> None:
        built = node("n1").card().node()
        inventory = gputile.write_inventory(NodeInventory(built.cards, one_at_a_time=True))
        manifest = node("n1").card().manifest()
        manifest["metadata"]["annotations"][gputile.INVENTORY] = inventory
        assert Rig(manifest).cluster_state.guessing == {"n1"}

    def test_gpushares_unit_is_guessed_from_the_nodes(self) -> None:
        cluster_state = ClusterState(Ledger(), DialectSettings(gpushare_unit="auto"))
        counts = raw_node({"aliyun.com/gpu-mem": 2 * 16000, "aliyun.com/gpu-count": 2})
        cluster_state.nodes_listed([msgspec.convert(counts, NodeObject)])
        assert cluster_state.settings.gpushare_unit == "MiB"


class TestStarting:
    def test_a_pod_is_starting_from_its_binding_until_its_kubelet_has_admitted_it(self) -> None:
        rig = small()
        rig.arrive(tile(8), annotations=grant(), on="n1")
        assert rig.cluster_state.starting("n1") == "uid-web-0"
        assert rig.cluster_state.starting("n1", ignoring="uid-web-0") is None
        assert rig.cluster_state.starting("n2") is None
        rig.change("web-0", status={"phase": "Running"})
        rig.catch_up()
        assert rig.cluster_state.starting("n1") is None

    def test_a_pod_that_ended_before_it_started_is_not(self) -> None:
        rig = small()
        rig.arrive(tile(8), annotations=grant(), on="n1")
        rig.change("web-0", status={"phase": "Failed"})
        rig.catch_up()
        assert rig.cluster_state.starting("n1") is None

    def test_a_pod_with_a_grant_is_newly_bound_when_it_is_first_seen(self) -> None:
        rig = small()
        rig.arrive(tile(8), annotations=grant(), on="n1")
        assert list(rig.cluster_state.newly_bound) == ["uid-web-0"]
        rig.cluster_state.newly_bound.clear()
        rig.change("web-0", status={"phase": "Running"})
        rig.catch_up()
        assert rig.cluster_state.newly_bound == {}


def test_a_grant_on_a_card_with_a_generated_uuid_holds_the_same_card_under_its_real_uuid() -> None:
    """While an agent only counts cards they are called n1#0 and n1#1; then our agent reports their UUIDs."""
    rig = Rig(raw_node({"aliyun.com/gpu-mem": 2 * 16, "aliyun.com/gpu-count": 2}))
    tiles = [{"uuid": "n1#1", "index": 1, "memory": 8, "cores": 0}]
    annotations = grant(containers=[{"name": "c0", "tiles": tiles}])
    rig.arrive(tile(8), annotations=annotations, on="n1")
    rig.api.add_node(node("n1").cards(2, size=16).manifest())
    rig.catch_up()
    assert rig.free() == [16, 8]
    assert rig.cluster_state.invalid_grants == {}
