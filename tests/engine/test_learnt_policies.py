"""Fragmentation and tiling: the meter against its definition, scores kept up to date against new scores."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputile.engine.fleet.fleet import Fleet
from gputile.engine.placement.place import Placement
from gputile.engine.placement.shares import CARD
from gputile.engine.policies import tiling
from gputile.engine.policies.cutting_stock import values
from gputile.engine.policies.fragmentation import Fragments, NodeArrays
from gputile.engine.policies.workload_model import (
    FIRST_REFRESH,
    MOST_TASKS,
    PRICE_EVERY,
    PodKind,
    Supply,
    WorkloadModel,
    model_prices,
    tables,
    task_of,
)
from gputile.model.cards import Use
from gputile.model.requests import ModelRule, PodRequest
from gputile.testing.builders import NodeBuilder, ask, node, wants
from tests.effort import examples

TASKS = {
    PodKind(2000, 1, 30): 5.0,
    PodKind(4000, 1, 60): 3.0,
    PodKind(8000, 2, 100): 1.0,
    PodKind(3000, 0, 0): 2.0,
    PodKind(1000, 1, 50, (ModelRule(("T4",)),)): 2.0,
}
SUPPLY = Supply(models=("A100", "T4"), free=(8.0, 2.0), free_cpu=64_000.0, cpu_per_card=8000.0)


def fragment_of(task: PodKind, shares: list[int], models: list[str], cpu: int) -> int:
    """The definition, literally."""
    idle = sum(shares)
    fitting = [s for s, m in zip(shares, models, strict=True) if task.accepts(m) and s >= task.share * 100 and s > 0]
    if not task.cards or cpu < task.cpu or len(fitting) < task.cards:
        return idle
    return idle - sum(fitting)


def mean_fragment(shares: list[int], models: list[str], cpu: int) -> float:
    total = sum(TASKS.values())
    return sum(w / total * fragment_of(t, shares, models, cpu) for t, w in TASKS.items()) / CARD


SHARES = st.lists(st.sampled_from([*range(0, 11_000, 1000), *[CARD] * 6]), min_size=3, max_size=3)
MODELS = st.lists(st.sampled_from(["A100", "T4"]), min_size=3, max_size=3)


@examples(80)
@given(SHARES, MODELS, st.integers(0, 10_000), st.integers(0, 5), st.sampled_from([1, 3000]))
def test_the_meter_and_its_gains_are_as_defined(
    shares: list[int], models: list[str], cpu: int, tenths: int, pod_cpu: int
) -> None:
    learnt = tables(TASKS, SUPPLY)
    look = NodeArrays(
        share=np.array(shares, dtype=np.int64)[:, None],
        model=np.array([SUPPLY.models.index(m) for m in models], dtype=np.int64)[:, None],
        cpu=np.array([cpu], dtype=np.int64),
    )
    fragments = Fragments(look, learnt)
    now = mean_fragment(shares, models, cpu)
    assert fragments.now[0] == pytest.approx(now)
    assert fragments.gain_of_cpu(pod_cpu)[0] == pytest.approx(now - mean_fragment(shares, models, cpu - pod_cpu))
    tile = tenths * 1000
    capacity_generation = fragments.gain_of_tiles(np.full((3, 1), tile, dtype=np.int64), pod_cpu)
    for card in range(3):
        if shares[card] >= tile:
            after = [s - tile if n == card else s for n, s in enumerate(shares)]
            assert capacity_generation[card, 0] == pytest.approx(now - mean_fragment(after, models, cpu - pod_cpu))
    idle = [n for n, share in enumerate(shares) if share == CARD]
    if len(idle) >= 2:
        after = [0 if n in idle[:2] else s for n, s in enumerate(shares)]
        want = now - mean_fragment(after, models, cpu - pod_cpu)
        assert fragments.gain_of_whole_cards(2, pod_cpu)[0] == pytest.approx(want)


def cluster() -> Fleet:
    fleet = Fleet()
    for name in ("n0", "n1", "n2"):
        fleet.set_node(node(name, cpu="16").cards(2, "A100", 1000).card("T4", 500).node())
    fleet.fragmentation()  # learns the prior from these nodes
    return fleet


REQUESTS: list[PodRequest] = [
    wants(ask(percent=30), cpu=1000),
    wants(ask(400), cpu=1000),
    wants(ask(whole=True, cards=2), cpu=4000),
    wants(ask(100, cards=2)),
    wants(ask(200, name="a"), ask(100, name="b"), cpu=500),
    wants(ask(100), models=(ModelRule(("T4",)),)),
    wants(ask(100), uuids=("GPU-n0-0", "GPU-n1-2")),
    wants(cpu=2000),
    wants(ask(100), cpu=1000, host=300_000),
    wants(ask(100), cpu=1000),
]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("hold"), st.integers(0, 2), st.integers(0, 2)),
        st.tuples(st.just("release"), st.integers(0, 2), st.integers(0, 2)),
        st.tuples(st.just("host"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("learn"), st.integers(0, len(REQUESTS) - 1), st.just(0)),
        st.tuples(st.just("ask"), st.integers(0, len(REQUESTS) - 1), st.just(0)),
        st.tuples(st.just("node"), st.integers(0, 2), st.integers(1, 5)),
        st.tuples(st.just("gone"), st.integers(0, 2), st.just(0)),
    ),
    max_size=12,
)


@pytest.mark.parametrize("policy", ["fragmentation", "tiling"])
@examples(60)
@given(STEPS)
def test_scores_kept_up_to_date_equal_new_scores(policy: str, steps: list[tuple[str, int, int]]) -> None:
    kept = cluster()
    log: list[tuple[str, int, int]] = []
    for step in steps:
        log.append(step)
        play(kept, step, policy)
    fresh = cluster()
    for step in log:
        if step[0] != "ask":
            play(fresh, step, policy)
    for request in REQUESTS:
        fitting = kept.fits(request)
        assert fitting.tolist() == fresh.fits(request).tolist()
        assert kept.scores(request, fitting, policy).tolist() == pytest.approx(
            fresh.scores(request, fitting, policy).tolist()
        )
        assert kept.best(request, policy) == fresh.best(request, policy)
        for name in kept.names():
            assert kept.place(request, name, policy) == fresh.place(request, name, policy)


def play(fleet: Fleet, step: tuple[str, int, int], policy: str) -> None:
    what, number, other = step
    if what == "hold":
        fleet.hold(f"n{number}", {f"GPU-n{number}-{other}": Use(90, 10, 1)}, 1000)
    elif what == "ask":
        for name in fleet.best(REQUESTS[number], policy):
            fleet.place(REQUESTS[number], name, policy)
    elif what == "release":
        fleet.release(f"n{number}", {f"GPU-n{number}-{other}": Use(90, 10, 1)}, 1000)
    elif what == "host":
        fleet.hold(f"n{number}", {}, 0, 300_000)
    elif what == "learn":
        for _ in range(PRICE_EVERY):
            fleet.scorer.observe(REQUESTS[number])
        fleet.scorer.refresh()
    elif what == "node":
        made = node(f"n{number}", cpu="16" if other < 5 else "2").card("A100", 1000)
        made.cards(2, "T4" if other > 2 else "A100", 1000, healthy=other != 2, cordoned=other == 4)
        fleet.set_node(made.node())
    else:
        fleet.remove_node(f"n{number}")


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(node("n0").cards(1, "T4", 1000), id="another-model"),
        pytest.param(node("n0").cards(1, "A100", 1000, healthy=False), id="an-unhealthy-card"),
        pytest.param(node("n0").cards(1, "A100", 1000, cordoned=True), id="a-cordoned-card"),
        pytest.param(node("n0").cards(1, "A100", 1000, mode="mig"), id="a-card-in-mig-mode"),
        pytest.param(node("n0").cards(1, "A100", 1000).facts(fault="AgentStale"), id="a-stale-agent"),
    ],
)
def test_a_node_with_as_much_free_may_yet_be_another(after: NodeBuilder) -> None:
    """The cached score of a node's state must not be used for another kind of node."""
    fleet, request = Fleet(), wants(ask(100), models=(ModelRule(("A100",)),))
    fleet.set_node(node("n0").cards(1, "A100", 1000).node())
    assert fleet.best(request, "tiling") == ["n0"]
    fleet.set_node(after.node())
    assert fleet.best(request, "tiling") == []


def test_a_score_is_not_taken_from_a_node_in_the_same_state_when_the_pod_names_its_card() -> None:
    fleet = Fleet()
    for name in ("n0", "n1", "n2"):
        fleet.set_node(node(name).cards(1, "A100", 1000).node())
    for name in ("n0", "n1", "n2"):
        assert fleet.best(wants(ask(100), uuids=(f"GPU-{name}-0",)), "tiling") == [name]


def test_a_chosen_card_is_not_taken_from_before_the_prices_changed() -> None:
    fleet, request = Fleet(), wants(ask(500), cpu=1000)
    fleet.set_node(node("n", cpu="64").card("A100", 1000).card("T4", 1000).node())

    def model_chosen() -> str:
        placement = fleet.place(request, "n", "tiling")
        assert isinstance(placement, Placement)
        return ("A100", "T4")[placement.containers[0].tiles[0].index]

    assert model_chosen() == "A100"
    for _ in range(PRICE_EVERY):
        fleet.scorer.observe(wants(ask(500), cpu=1000, models=(ModelRule(("A100",)),)))
    fleet.scorer.refresh_prices()
    assert model_chosen() == "T4", "the A100 is expensive now"


def test_an_unused_row_differs_from_a_node_without_cards() -> None:
    fleet, request = Fleet(), wants()
    fleet.set_node(node("n0", cpu="0", host="0").node())
    assert fleet.best(request, "tiling") == ["n0"]
    fleet.remove_node("n0")
    assert fleet.best(request, "tiling") == []


@pytest.mark.parametrize("policy", ["fragmentation", "tiling"])
@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: "+".join(f"{a.cards}" for a in r.asks) or "cpu")
def test_what_is_best_can_be_placed(policy: str, request_: PodRequest) -> None:
    fleet = cluster()
    fleet.hold("n1", {"GPU-n1-0": Use(700, 0, 1)}, 2000)
    for name in fleet.best(request_, policy):
        assert isinstance(fleet.place(request_, name, policy), Placement)


class TestTheRule:
    """Each term of the tiling score, by numbers."""

    LEARNT = msgspec.structs.replace(
        tables({PodKind(8000, 1, 65): 1.0, PodKind(8000, 1, 47): 2.0, PodKind(8000, 1, 32): 1.0}, SUPPLY),
        value=values({65: 2 / 3, 47: 1 / 2, 32: 1 / 3}),
    )

    def look(self, shares: list[int], cpu: int) -> NodeArrays:
        column = np.array(shares, dtype=np.int64)[:, None]
        return NodeArrays(share=column, model=np.zeros_like(column), cpu=np.array([cpu], dtype=np.int64))

    def test_a_card_loses_what_its_remainder_was_worth(self) -> None:
        look, tile = self.look([5300, 3500, CARD], 64_000), np.full((3, 1), 3200, dtype=np.int64)
        lost = tiling.worth_lost(look, tile, self.LEARNT)[:, 0]
        assert lost == pytest.approx([1 / 2, 1 / 3, 1 - 2 / 3], abs=1e-3)
        scores = tiling.tile_scores(Fragments(look, self.LEARNT), tile, np.ones((3, 1)))
        assert scores[:, 0] == pytest.approx(0.1 - lost)

    def test_idle_cards_beyond_the_cpu_are_stranded(self) -> None:
        rho = self.LEARNT.rho
        assert rho == pytest.approx(8000 * 4 / (0.65 + 2 * 0.47 + 0.32))
        stranded = tiling.stranded(np.array([2.0, 2.0]), np.array([64_000, 8000]), self.LEARNT)
        assert stranded == pytest.approx([0.0, 2.0 - 8000 / (0.85 * rho)])

    def test_a_node_pays_for_what_a_pod_strands_there(self) -> None:
        size, cpu = np.array([0.5]), 14_000
        much_cpu, little_cpu = (
            float(tiling.node_scores(Fragments(self.look([CARD, CARD], host), self.LEARNT), size, cpu)[0])
            for host in (64_000, 16_000)
        )
        served = 0.85 * self.LEARNT.rho
        stranded = (1.5 - 2000 / served) - (2.0 - 16_000 / served)
        best_fit = 0.005 * 48 / 128
        assert much_cpu - little_cpu == pytest.approx(0.2 * stranded - best_fit)

    def test_a_pod_without_gpu_strands_too_unless_cpu_is_short_everywhere(self) -> None:
        look = self.look([CARD, CARD], 16_000)
        fragments = Fragments(look, self.LEARNT)
        plain, starved = (float(tiling.cpu_pod_scores(fragments, 14_000, starved=short)[0]) for short in (False, True))
        assert starved - plain == pytest.approx(0.2 * 14_000 / (0.85 * self.LEARNT.rho))

    def test_the_scarcity_of_a_model_is_paid_by_the_size_of_the_pod(self) -> None:
        fleet = Fleet()
        fleet.set_node(node("scarce", cpu="64").cards(2, "T4", 100).node())
        fleet.set_node(node("plain", cpu="64").cards(2, "A100", 100).node())
        request = wants(ask(whole=True, cards=2), cpu=1000)
        fitting = fleet.fits(request)
        before = fleet.scores(request, fitting, "tiling")
        insists = wants(ask(whole=True), cpu=1000, models=(ModelRule(("T4",)),))
        for _ in range(99):  # too few for new tables, and then one more for new prices
            fleet.scorer.observe(insists)
        fleet.scorer.observe(request)
        fleet.scorer._price()
        after = fleet.scores(request, fitting, "tiling")
        wanted_t4, wanted_any = 99 / 101, 2 / 101  # of the demand in cards
        dear, plain = wanted_t4 * 4 / 2 + wanted_any, wanted_any
        assert after - before == pytest.approx([-0.03 * 2 * (dear - 1), -0.03 * 2 * (plain - 1)])


@pytest.mark.parametrize("cards", [2, 4, 8])
def test_memory_in_mib_and_a_percentage_of_the_same_size_score_alike(cards: int) -> None:
    fleet = Fleet()
    fleet.set_node(node("n", cpu="64").cards(cards, "A100", 1000).node())
    fleet.set_node(node("wide", cpu="64").cards(8, "A100", 1000).node())
    scores = [
        fleet.scores(request, fleet.fits(request), "tiling").tolist()
        for request in (wants(ask(130), cpu=1000), wants(ask(percent=13), cpu=1000))
    ]
    assert scores[0] == pytest.approx(scores[1])


def test_a_fleet_without_cards_answers_after_constraints_were_learnt() -> None:
    fleet = Fleet()
    fleet.set_node(node("plain", cpu="8").node())
    for _ in range(120):
        fleet.scorer.observe(wants(ask(percent=50), models=(ModelRule(("T4",)),)))
    fleet.scorer.refresh()
    assert fleet.best(wants(cpu=1000), "tiling") == ["plain"]
    assert isinstance(fleet.place(wants(cpu=1000), "plain", "tiling"), Placement)


def test_tiling_puts_a_tile_beside_the_one_it_completes() -> None:
    """0.32 beside 0.65 leaves nothing of worth; beside 0.47 it wastes a half."""
    fleet = Fleet()
    fleet.set_node(node("n", cpu="64").cards(2, "A100", 100).node())
    for percent in (65, 32, 47) * 100:
        fleet.scorer.observe(wants(ask(percent=percent), cpu=1000))
    fleet.scorer.refresh()
    fleet.hold("n", {"GPU-n-0": Use(47, 0, 1)}, 1000)
    fleet.hold("n", {"GPU-n-1": Use(65, 0, 1)}, 1000)
    placed = fleet.place(wants(ask(percent=32), cpu=1000), "n", "tiling")
    assert isinstance(placed, Placement)
    assert placed.containers[0].tiles[0].index == 1


def test_tiling_does_not_strand_cards_on_a_node_without_cpu() -> None:
    """A pod that needs much CPU is placed where no card is left without CPU, even if that node is emptier."""
    fleet = Fleet()
    fleet.set_node(node("much-cpu", cpu="64").cards(2, "A100", 100).node())
    fleet.set_node(node("little-cpu", cpu="16").cards(2, "A100", 100).node())
    for _ in range(200):
        fleet.scorer.observe(wants(ask(percent=100), cpu=8000))
    fleet.scorer.refresh()
    request = wants(ask(percent=50), cpu=14_000)
    assert fleet.best(request, "tiling", keep=1) == ["much-cpu"]
    assert fleet.best(request, "binpack", keep=1) == ["little-cpu"]


def test_tiling_keeps_scarce_models_for_pods_that_require_them() -> None:
    fleet = Fleet()
    fleet.set_node(node("scarce", cpu="64").cards(2, "T4", 100).node())
    fleet.set_node(node("plain", cpu="64").cards(8, "A100", 100).node())
    for _ in range(100):
        fleet.scorer.observe(wants(ask(whole=True), cpu=1000, models=(ModelRule(("T4",)),)))
        fleet.scorer.observe(wants(ask(whole=True), cpu=1000))
    fleet.scorer.refresh()
    assert fleet.best(wants(ask(whole=True), cpu=1000), "binpack", keep=1) == ["scarce"]
    assert fleet.best(wants(ask(whole=True), cpu=1000), "tiling", keep=1) == ["plain"]


class TestLearning:
    @pytest.mark.parametrize(
        ("request_", "want"),
        [
            pytest.param(wants(ask(percent=30), cpu=5), PodKind(5, 1, 30), id="a-percentage-is-a-share"),
            pytest.param(wants(ask(401)), PodKind(0, 1, 41), id="MiB-are-a-share-of-the-average-card-rounded-up"),
            pytest.param(wants(ask(100, cores=60)), PodKind(0, 1, 60), id="cores-count-when-they-are-more"),
            pytest.param(wants(ask(whole=True, cards=4)), PodKind(0, 4, 100), id="whole-cards"),
            pytest.param(wants(ask(100, name="a"), ask(300, cards=2, name="b")), PodKind(0, 2, 30), id="the-largest"),
            pytest.param(
                wants(ask(200, name="a"), ask(100, name="b"), together=True), PodKind(0, 1, 30), id="together"
            ),
            pytest.param(wants(cpu=7), PodKind(7, 0, 0), id="no-GPU"),
            pytest.param(wants(ask(9999)), PodKind(0, 1, 100), id="never-more-than-a-card"),
            pytest.param(wants(ask(125)), PodKind(0, 1, 12), id="an-eighth-fits-eight-times"),
            *(pytest.param(wants(ask(percent=p)), PodKind(0, 1, p), id=f"{p}-percent-is-{p}") for p in (7, 28, 34, 81)),
        ],
    )
    def test_a_pod_is_a_task(self, request_: PodRequest, want: PodKind) -> None:
        assert task_of(request_, 1000) == want

    def test_tables_are_due_at_100_200_400_pods(self) -> None:
        learner, due = WorkloadModel(), []
        for arrival in range(1, 900):
            learner.observe(PodKind(1, 1, 50))
            if learner.due():
                due.append(arrival)
                learner.prepare(SUPPLY)
        assert due == [FIRST_REFRESH, 200, 400, 800]

    def test_rare_tasks_are_left_out(self) -> None:
        counts = {PodKind(1, 1, 50): 95.0, PodKind(2, 1, 60): 5.0}
        assert len(tables(counts, SUPPLY).weight) == 1

    def test_prices_are_one_when_all_pods_accept_all_models(self) -> None:
        assert model_prices({PodKind(1, 1, 50): 3.0}, SUPPLY).tolist() == pytest.approx([1, 1])

    def test_a_required_model_is_expensive(self) -> None:
        counts = {PodKind(1, 1, 100): 1.0, PodKind(1, 1, 100, (ModelRule(("T4",)),)): 1.0}
        assert model_prices(counts, SUPPLY).tolist() == pytest.approx([0.5, 0.5 + 0.5 * 10 / 2])

    def test_the_mix_of_a_list_is_taken_as_it_is(self) -> None:
        fleet = cluster()
        fleet.scorer.learn_all([wants(ask(whole=True, cards=8), cpu=10)] * 3)
        assert fleet.fragmentation() == pytest.approx(9.0), "no node can take eight cards: all nine are fragments"

    def test_after_a_restart_the_pods_of_the_cluster_teach_the_same(self) -> None:
        pods = [REQUESTS[n % 6] for n in range(200)]
        lived, restarted = cluster(), cluster()
        for request in pods:
            lived.scorer.observe(request)
            lived.scorer.refresh()
        restarted.scorer.relearn(pods)
        for request in REQUESTS:
            fitting = lived.fits(request)
            want = lived.scores(request, fitting, "tiling").tolist()
            assert restarted.scores(request, fitting, "tiling").tolist() == pytest.approx(want)

    def test_counting_a_pod_changes_no_score_until_the_refresh(self) -> None:
        fleet = cluster()
        request = wants(ask(percent=32), cpu=1000)
        fitting = fleet.fits(request)
        before = fleet.scores(request, fitting, "tiling").tolist()
        for _ in range(150):
            fleet.scorer.observe(request)
        assert fleet.scores(request, fitting, "tiling").tolist() == before
        fleet.scorer.refresh()
        assert fleet.scores(request, fitting, "tiling").tolist() != before

    def test_a_model_that_comes_later_is_learnt_too(self) -> None:
        fleet = cluster()
        for _ in range(120):
            fleet.scorer.observe(wants(ask(percent=50), cpu=1000, models=(ModelRule(("T4",)),)))
        fleet.scorer.refresh()
        fleet.set_node(node("new", cpu="16").cards(2, "H100", 1000).node())
        request = wants(ask(percent=50), cpu=1000, models=(ModelRule(("H100",)),))
        assert fleet.best(request, "tiling") == ["new"]
        assert isinstance(fleet.place(request, "new", "tiling"), Placement)

    def test_kinds_of_pods_that_never_recur_do_not_fill_memory(self) -> None:
        learner = WorkloadModel()
        for cpu in range(MOST_TASKS + 10):
            learner.observe(PodKind(cpu, 1, 50))
            learner.observe(PodKind(1, 1, 30))
        assert len(learner.asked()) <= MOST_TASKS
        assert learner.asked()[PodKind(1, 1, 30)] == MOST_TASKS + 10
