"""Replays of small lists made here: what arrives, what is measured, and that it is the same every time."""

import gzip
from pathlib import Path

import pytest

from gputile.engine.policies.table import POLICIES
from gputile.model.cards import Node
from gputile.model.errors import InputError
from gputile.model.requests import ModelRule
from gputile.sim.replay import ReplayPlan, arrivals, replay, size_of
from gputile.sim.steady_state import steady
from gputile.sim.traces import Job, load_jobs, load_nodes
from gputile.sim.what_if import change
from gputile.testing.builders import ask, node, wants

NODES_CSV = "sn,cpu_milli,memory_mib,gpu,model\nn1,64000,262144,2,P100\nn2,96000,262144,4,T4\n"
PODS_CSV = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,creation_time,deletion_time,scheduled_time\n"
    "p3,1000,1024,0,0,,0,50,0\n"
    "p1,12000,16384,2,1000,,0,100,10\n"
    "p2,6000,12288,1,460,P100|T4,5,105,\n"
)


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


class TestLists:
    @pytest.mark.parametrize("name", ["nodes.csv", "nodes.csv.gz"])
    def test_nodes(self, tmp_path: Path, name: str) -> None:
        first, second = load_nodes(written(tmp_path, name, NODES_CSV))
        assert (first.name, first.cpu, first.memory, len(first.cards)) == ("n1", 64000, 262144, 2)
        assert {card.model for card in second.cards} == {"T4"}

    def test_pods_are_sorted_by_name_with_their_shares_models_and_times(self, tmp_path: Path) -> None:
        whole, part, plain = load_jobs(written(tmp_path, "pods.csv", PODS_CSV))
        assert (whole.name, size_of(whole.request, 1000), whole.request.asks[0].exclusive) == ("p1", 2.0, True)
        assert size_of(part.request, 1000) == pytest.approx(0.46)
        assert part.request.constraints.models == (ModelRule(("P100", "T4")),)
        assert (plain.request.asks, plain.request.cpu) == ((), 1000)
        assert [job.seconds for job in (whole, part, plain)] == [90.0, None, 50.0], "p2 was never scheduled"

    def test_manifests_serve_too(self, tmp_path: Path) -> None:
        text = "kind: Deployment\nmetadata: {name: d}\nspec: {replicas: 2, template: {spec: {containers: [%s]}}}"
        pods = written(tmp_path, "pods.yaml", text % "{name: m, resources: {limits: {gputile.io/gpu: 1}}}")
        assert [job.name for job in load_jobs(pods)] == ["default/d-0", "default/d-1"]
        nodes = written(
            tmp_path, "nodes.yaml", "kind: Node\nmetadata: {name: n}\nstatus: {capacity: {nvidia.com/gpu: 2}}"
        )
        assert len(load_nodes(nodes)[0].cards) == 2

    def test_pods_without_gpu_count_in_manifests_too(self, tmp_path: Path) -> None:
        text = "kind: Pod\nmetadata: {name: p}\nspec: {containers: [{name: m, resources: {requests: {cpu: 2}}}]}"
        (job,) = load_jobs(written(tmp_path, "pods.yaml", text))
        assert (job.request.asks, job.request.cpu) == ((), 2000)

    def test_a_list_from_a_spreadsheet_is_read(self, tmp_path: Path) -> None:
        assert len(load_nodes(written(tmp_path, "NODES.CSV", "\ufeff" + NODES_CSV))) == 2

    @pytest.mark.parametrize(
        ("text", "fragment"),
        [
            pytest.param("p9,1,1,1,0,,0,1,0\n", "line 5: num_gpu without gpu_milli", id="no-share"),
            pytest.param(
                "p9,1,1,1,5,,0,inf,0\n",
                "line 5: scheduled_time '0' or deletion_time 'inf' is not a time",
                id="for-ever",
            ),
            pytest.param("p9,1,1,1,5,,0,soon,0\n", "deletion_time 'soon' is not a time", id="a-word"),
            pytest.param('"p9,1,1,1,5\n', "the line is not valid CSV", id="an-open-quote"),
        ],
    )
    def test_invalid_pods_are_reported(self, tmp_path: Path, text: str, fragment: str) -> None:
        with pytest.raises(InputError, match=r"p\.csv") as caught:
            load_jobs(written(tmp_path, "p.csv", PODS_CSV + text))
        assert fragment in str(caught.value)

    def test_two_nodes_of_one_name_are_rejected(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="node 'n1' is defined twice"):
            load_nodes(written(tmp_path, "n.csv", NODES_CSV + "n1,1,1,1,T4\n"))

    @pytest.mark.parametrize(
        ("name", "text", "fragment"),
        [
            pytest.param("n.csv", "sn,cpu_milli\n", "line 1: expected the columns sn,", id="columns"),
            pytest.param("n.csv", NODES_CSV + "n3,many,1,1,T4\n", "line 4: 'many' is not a whole number", id="a-word"),
            pytest.param("n.csv", NODES_CSV + "n3,-5,1,1,T4\n", "line 4: '-5' is not an amount", id="negative"),
            pytest.param("n.csv", NODES_CSV + "n3,5\n", "line 4", id="a-short-line"),
            pytest.param("n.yaml", "kind: [", "invalid YAML", id="YAML"),
        ],
    )
    def test_invalid_files_are_reported_with_line_and_expected_columns(
        self, tmp_path: Path, name: str, text: str, fragment: str
    ) -> None:
        path = written(tmp_path, name, text)
        with pytest.raises(InputError, match=name) as caught:
            load_nodes(path)
        assert fragment in str(caught.value)

    def test_a_broken_archive_is_reported(self, tmp_path: Path) -> None:
        path = tmp_path / "x.csv.gz"
        path.write_bytes(b"no gzip")
        with pytest.raises(InputError, match="cannot be read"):
            load_jobs(path)


def small() -> list[Node]:
    return [node(f"n{n}", cpu="32").cards(4, "A100", 1000).node() for n in range(6)]


JOBS = [
    *(Job(f"a{n}", wants(ask(percent=30), cpu=1000), 100.0) for n in range(6)),
    *(Job(f"b{n}", wants(ask(percent=70), cpu=2000), 200.0) for n in range(6)),
    *(Job(f"c{n}", wants(ask(whole=True, cards=2), cpu=4000), 300.0) for n in range(2)),
    Job("d", wants(cpu=500), 50.0),
]


class TestArrivals:
    def test_the_list_is_drawn_from_until_the_target_is_reached(self) -> None:
        drawn = arrivals(JOBS, 30.0, 1, 1000)
        total = sum(size_of(job.request, 1000) for job in drawn)
        assert 28.0 <= total <= 32.0
        assert {job.name for job in drawn} == {job.name for job in JOBS}

    def test_a_list_that_is_too_long_is_thinned_out(self) -> None:
        drawn = arrivals(JOBS, 5.0, 1, 1000)
        assert sum(size_of(job.request, 1000) for job in drawn) <= 5.0

    def test_a_seed_gives_the_same_list_and_another_another(self) -> None:
        names = [[job.name for job in arrivals(JOBS, 30.0, seed, 1000)] for seed in (1, 1, 2)]
        assert names[0] == names[1] != names[2]


@pytest.mark.parametrize("policy", ["binpack", "spread", "random", "fragmentation", "tiling"])
def test_a_replay_is_repeatable_and_measures_what_it_places(policy: str) -> None:
    progress: list[float] = []
    plan = ReplayPlan(policy=policy, random_ties=policy == "spread")
    first, second = (replay(small(), JOBS, plan, progress.append) for _ in range(2))
    assert first.curve == second.curve
    assert first.cards == 24
    assert 75.0 < first.final <= 100.0
    assert first.allocated_cards == pytest.approx(first.final * 24 / 100)
    assert first.at_full is not None
    assert first.first_refusal is not None
    assert first.refused > 0
    assert progress


def test_the_workload_of_the_list_may_be_known_beforehand() -> None:
    plan = ReplayPlan(policy="fragmentation", mix_from_list=True, shuffle_nodes=False)
    assert replay(small(), JOBS, plan, lambda part: None).final > 75.0


def test_nodes_without_gpu_take_the_pods_without_gpu() -> None:
    nodes = [*small(), node("plain", cpu="500").node()]
    for policy in POLICIES:
        run = replay(nodes, JOBS, ReplayPlan(policy=policy), lambda part: None)
        assert run.cards == 24


def test_allocation_is_that_of_the_cards_taken_not_of_an_average_card() -> None:
    nodes = [node("n", cpu="64").cards(2, "A100", "80Gi").cards(2, "T4", "16Gi").node()]
    jobs = [Job(f"p{n}", wants(ask("80Gi")), 1.0) for n in range(5)]
    run = replay(nodes, jobs, ReplayPlan(policy="binpack"), lambda part: None)
    assert (run.allocated_cards, run.final) == (2.0, 50.0)
    more, plan = change("+20:T4:4x16Gi", nodes, ReplayPlan(policy="binpack"))
    changed = replay(more, jobs, plan, lambda part: None, base=nodes)
    assert (changed.pods, changed.allocated_cards) == (run.pods, 2.0)


class TestWhatIf:
    PLAN = ReplayPlan(policy="binpack")

    def test_nodes_are_added_with_the_clusters_cpu_per_card(self) -> None:
        nodes, _ = change("+2:L40S:8x48Gi", small(), self.PLAN)
        assert [len(changed.cards) for changed in nodes[6:]] == [8, 8]
        assert nodes[-1].cpu == 32_000 * 2
        assert nodes[-1].cards[0].model == "L40S"

    def test_nodes_are_removed_and_the_policy_changed(self) -> None:
        nodes, plan = change("-n3, policy=spread", small(), self.PLAN)
        assert [changed.name for changed in nodes] == ["n0", "n1", "n2", "n4", "n5"]
        assert plan.policy == "spread"

    @pytest.mark.parametrize("text", ["+x", "4:L40S:8x48Gi", "-nobody", "+1:T4:8x", "+1:T4:8xGi"])
    def test_an_invalid_change_is_reported(self, text: str) -> None:
        with pytest.raises(InputError, match="--what-if"):
            change(text, small(), self.PLAN)

    def test_two_additions_have_names_of_their_own(self) -> None:
        nodes, _ = change("+1:L40S:2x48Gi,+1:L40S:1x48Gi", small(), self.PLAN)
        assert len({changed.name for changed in nodes}) == 8

    def test_more_nodes_allocate_more_of_the_same_demand(self) -> None:
        base = replay(small(), JOBS, self.PLAN, lambda part: None)
        nodes, plan = change("+3:L40S:4x48Gi", small(), self.PLAN)
        more = replay(nodes, JOBS, plan, lambda part: None, base=small())
        assert more.pods == base.pods
        assert more.allocated_cards > base.allocated_cards
        assert more.refused < base.refused


class TestLeaving:
    def test_a_steady_state_below_capacity(self) -> None:
        run = steady(small(), JOBS, ReplayPlan(policy="tiling", ratio=0.6), lambda part: None, pods=400)
        assert 45.0 < run.allocated < 75.0
        assert run.mean_wait <= run.p95_wait or run.p95_wait == 0.0
        assert run.never_started < 20

    def test_beyond_capacity_pods_are_pending(self) -> None:
        calm, busy = (
            steady(small(), JOBS, ReplayPlan(policy="binpack", ratio=ratio), lambda part: None, pods=400)
            for ratio in (0.5, 1.5)
        )
        assert busy.waiting > calm.waiting
        assert busy.allocated > calm.allocated

    def test_the_same_work_comes_to_a_changed_cluster(self) -> None:
        nodes, plan = change("+6:A100:4x1Gi", small(), ReplayPlan(policy="binpack", ratio=0.8))
        base, more = (
            steady(cluster, JOBS, plan, lambda part: None, base=small(), pods=300) for cluster in (small(), nodes)
        )
        assert more.hours == base.hours
        assert more.allocated == pytest.approx(base.allocated / 2, rel=0.1)

    def test_durations_can_be_cut_so_that_the_cluster_turns_over(self) -> None:
        plan = ReplayPlan(policy="tiling", ratio=0.8, mix_from_list=True)
        whole, cut = (
            steady(small(), JOBS, plan, lambda part: None, pods=300, longest=seconds) for seconds in (1e9, 100.0)
        )
        assert cut.hours < whole.hours
        assert cut.turned_over > 100.0

    def test_a_list_without_times_is_rejected(self) -> None:
        with pytest.raises(InputError, match="the list: no GPU pod has the times scheduled_time and deletion_time"):
            steady(small(), [Job("a", wants(ask(percent=30)))], ReplayPlan(policy="binpack"), lambda part: None)
