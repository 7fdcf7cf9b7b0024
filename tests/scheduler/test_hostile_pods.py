"""Hostile pods in every API of the scheduler: each request has one search budget, and the answer reports its end.

Seen to fail: with the recursive search (RecursionError in the loop), without the bound of 64 containers, with a budget
per node and attempt (the searches are counted), without the event messages, with tables computed on the event loop.
"""

import asyncio
import threading
from collections.abc import Callable

import msgspec
import pytest

from gputile.dialects.gputile import GRANT
from gputile.dialects.kube_objects import Pod
from gputile.engine.policies import cutting_stock
from gputile.engine.search_budget import SearchBudget
from gputile.kube.api import Json
from gputile.model.refusals import SENTENCE, NodeReason
from gputile.scheduler.extender_api import OfferedVictims, PreemptArgs
from gputile.scheduler.preemption import preemptor
from gputile.testing.builders import node, pod
from tests.scheduler.preemption_helpers import HIGH, LOW, notes
from tests.scheduler.rig import Rig, tile
from tests.scheduler.test_app import cluster, running, value
from tests.scheduler.test_cluster_state import grant

NODES = 40


def awkward(count: int = 17, size: int = 334, **rest: object) -> Json:
    """Two of its containers fit on a card of 1000, sixteen on eight cards; in sum there is enough for many more."""
    made = pod(*(tile(size + n) for n in range(count)), name="evil", uid="uid-evil")
    made["spec"] |= {"priority": HIGH, **rest}
    return made


def full() -> Rig:
    """Every card has a small tenant, and no two nodes are equal."""
    rig = Rig(*(node(f"n{n}").cards(8, size=1000, slots=40) for n in range(NODES)))
    for number in range(NODES):
        for card in range(8):
            size = 1 + number % 30 + card
            name, where = f"low-{number}-{card}", f"n{number}"
            held = grant(size, card, name=name, on=where)
            made = pod(tile(size), name=name, uid=f"uid-{name}", on=where, annotations=held)
            made["spec"]["priority"] = LOW
            rig.api.add_pod(made)
    rig.catch_up()
    return rig


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that every search has spent."""
    spent: list[int] = []
    real = SearchBudget.spend

    def spend(self: SearchBudget, steps: int = 1) -> bool:
        spent.append(steps)
        return real(self, steps)

    monkeypatch.setattr(SearchBudget, "spend", spend)
    return spent


NOT_FURTHER = SENTENCE[NodeReason.SEARCH]


class TestOneBudget:
    def test_filter_reports_a_truncated_search(self, steps: list[int]) -> None:
        rig = full()
        rig.api.add_pod(awkward())
        rig.catch_up()
        answer = rig.filter("evil")
        assert answer.names == []
        assert NOT_FURTHER in {**answer.failed, **answer.unresolvable}.values()
        assert "not searched further" in NOT_FURTHER
        assert sum(steps) < 6000

    def test_a_dry_run_too_also_on_nodes_of_the_request(self, steps: list[int]) -> None:
        rig = full()
        rig.api.add_pod(awkward())
        rig.catch_up()
        args = rig.args("evil", whole=True)
        answer = rig.filter_service.dry_run(args)
        assert NOT_FURTHER in {**answer.failed, **answer.unresolvable}.values()
        assert sum(steps) < 6000

    async def test_the_preempt_verb(self, steps: list[int]) -> None:
        rig = full()
        rig.api.add_pod(awkward())
        rig.catch_up()
        live = msgspec.convert(rig.live("evil"), Pod)
        offers = {f"n{n}": OfferedVictims((f"uid-low-{n}-0",)) for n in range(NODES)}
        assert await rig.preemptor.answer_in_slices(PreemptArgs(pod=live, offers=offers)) == {}
        assert rig.count("searches_truncated_total", search="preempt") == 1
        assert sum(steps) < 80_000

    async def test_a_namespace_with_truncated_searches_gets_brief_ones_for_a_while(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rig = full()
        rig.api.add_pod(awkward())
        rig.catch_up()
        live = msgspec.convert(rig.live("evil"), Pod)
        assert live.metadata is not None
        other = msgspec.structs.replace(live, metadata=msgspec.structs.replace(live.metadata, namespace="elsewhere"))
        args = PreemptArgs(pod=live, offers={f"n{n}": OfferedVictims((f"uid-low-{n}-0",)) for n in range(NODES)})
        given: list[float] = []
        made = SearchBudget

        def budget(steps: int, seconds: float, clock: Callable[[], float]) -> SearchBudget:
            given.append(seconds)
            rig.clock.now += seconds  # the search takes all of it
            return made(steps, seconds, clock)

        monkeypatch.setattr("gputile.scheduler.preemption.preemptor.SearchBudget", budget)
        await rig.preemptor.answer_in_slices(args)
        await rig.preemptor.answer_in_slices(args)
        rig.clock.now += 2  # a truncated brief search extends nothing
        await rig.preemptor.answer_in_slices(args)
        await rig.preemptor.answer_in_slices(msgspec.structs.replace(args, pod=other))
        rig.clock.now += 60
        await rig.preemptor.answer_in_slices(args)
        whole, brief = preemptor.ANSWER_SECONDS, preemptor.BRIEF
        assert given == [whole, brief, brief, whole, whole]

    async def test_our_own_preemption_writes_an_event(self, steps: list[int]) -> None:
        rig = full()
        rig.api.add_pod(awkward(16, 490))  # fits on an empty node only
        rig.catch_up()
        rig.filter("evil")
        rig.clock.now += 2.0
        await rig.preemptor.round()
        assert rig.api.evicted == []
        [(reason, message)] = notes(rig, "evil")
        assert reason == "PreemptionBlocked"
        assert "not searched further for victims" in message
        assert sum(steps) < 250_000

    async def test_the_explanation(self, steps: list[int]) -> None:
        rig = full()
        rig.api.add_pod(awkward())
        rig.catch_up()
        rig.filter("evil")
        await rig.pending_pods.round()
        [(reason, message)] = notes(rig, "evil")
        assert reason == "NoFittingGPU"
        assert "not searched further: there are too many ways to place its containers" in message
        assert rig.count("searches_truncated_total", search="explanation") == 1
        assert sum(steps) < 40_000

    async def test_other_tasks_run_meanwhile(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rig = full()
        rig.api.add_pod(awkward())
        rig.catch_up()
        rig.filter("evil")
        monkeypatch.setattr("gputile.concurrency.time_slices.SLICE", -1.0)
        rig.clock.pauses.clear()
        await rig.pending_pods.round()
        assert len(rig.clock.pauses) > NODES
        live = msgspec.convert(rig.live("evil"), Pod)
        rig.clock.pauses.clear()
        await rig.preemptor.answer_in_slices(
            PreemptArgs(pod=live, offers={f"n{n}": OfferedVictims(()) for n in range(NODES)})
        )
        assert len(rig.clock.pauses) > 1


class TestDeepPods:
    async def test_a_bound_pod_with_1200_init_containers_counts_by_its_grant_and_ends_nothing(self) -> None:
        tiles = [{"uuid": "GPU-n1-0", "index": 0, "memory": 5, "cores": 0}]
        held = [{"name": f"init-{n}", "role": "init", "tiles": tiles} for n in range(1200)]
        grant = {"version": 1, "pod": "uid-deep", "node": "n1", "dialect": "gputile", "containers": held}
        deep = pod(
            {"cpu": 1},
            init=(tile(5),) * 1200,
            name="deep",
            uid="uid-deep",
            on="n1",
            annotations={GRANT: msgspec.json.encode(grant).decode()},
        )
        async with running(cluster(pods=(deep,))) as replica:
            process, api = replica.process, replica.api
            await replica.until(process.is_synced)
            api.add_pod(pod(tile(16), name="web", uid="uid-web"))
            await replica.until(lambda: "uid-web" in process.cluster_state.pending)
            body = {"Pod": api.pods["default/web"], "Nodes": None, "NodeNames": ["n1"]}
            assert (await replica.ask("/gputile/filter", body))[1]["NodeNames"] == ["n1"]
            assert [free.memory for free in process.ledger.fleet.view("n1").free_by_card] == [11, 0]
            assert not value(process, "internal_errors_total", loop="watch pods")

    @pytest.mark.parametrize("count", [65, 1300])
    async def test_a_pending_pod_with_too_many_is_rejected_with_a_message_and_ends_nothing(self, count: int) -> None:
        deep = pod({"cpu": 1}, init=(tile(1),) * count, name="deep", uid="uid-deep")
        async with running(cluster(pods=(deep,))) as replica:
            process, api = replica.process, replica.api
            await replica.until(lambda: process.is_synced() and process.may_write())
            body = {"Pod": api.pods["default/deep"], "Nodes": None, "NodeNames": ["n1"]}
            answer = (await replica.ask("/gputile/filter", body))[1]
            message = f"pod: {count} of its containers request GPUs, and at most 64 of one pod may"
            assert message in answer["FailedAndUnresolvableNodes"]["n1"]
            await replica.until(lambda: any(note.pod == "deep" for note in api.notes))
            assert message in next(note.message for note in api.notes if note.pod == "deep")


async def test_the_model_is_computed_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred different fractions make a large linear program, and every user can create a hundred pods."""
    threads: list[bool] = []

    def prices(demand: dict[int, float]) -> dict[int, float]:
        threads.append(threading.current_thread() is threading.main_thread())
        return cutting_stock.prices(demand)

    monkeypatch.setattr("gputile.engine.policies.workload_model.prices", prices)
    async with running(cluster(node("n1").cards(2, size=100)), policy="tiling") as replica:
        process, api = replica.process, replica.api
        await replica.until(process.is_synced)
        threads.clear()
        for number in range(120):
            api.add_pod(pod(tile(number % 99 + 1), name=f"p{number}", uid=f"uid-{number}"))
        await replica.until(lambda: len(process.cluster_state.pending) == 120)
        process.tick(0.0)
        learner = process.learner
        await replica.until(lambda: threads and learner._training is not None and learner._training.done())
        assert threads == [False]
        await asyncio.sleep(0)
