"""A policy is a row of one table: a new row is all that filter, placement, the demo and the simulator need."""

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from gputile.cli.group import cli
from gputile.engine.placement.place import Placement
from gputile.engine.policies.table import POLICIES, LearntScores, Policy
from gputile.model.policies import DEFAULT_POLICY, POLICY_NAMES
from gputile.testing.builders import ask, node, wants
from tests.scheduler.rig import Rig, tile

NODES = "sn,cpu_milli,memory_mib,gpu,model\nn1,8000,65536,2,T4\nn2,64000,65536,2,T4\n"
PODS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,scheduled_time,deletion_time\n" + "".join(
    f"p{number},1000,1024,1,250,0,100\n" for number in range(20)
)

PLAIN = Policy(
    score_nodes=lambda sums, seed: sums.cpu_left,
    rank_card=lambda card, free, links, seed: (-card.index,),
    chosen="richest in CPU",
)
LEARNING = Policy(
    score_nodes=lambda sums, seed: -sums.cpu_left,
    rank_card=lambda card, free, links, seed: (card.index,),
    learnt=LearntScores(
        tiles=lambda fragments, tile, gain: np.indices(gain.shape)[0].astype(np.float64),  # the last card
        whole_cards=lambda gain: np.zeros(len(gain)),
        cpu_pod=lambda fragments, cpu, starved: -fragments.arrays.cpu.astype(np.float64),
        pod=lambda fragments, size, cpu: fragments.arrays.cpu.astype(np.float64),
    ),
    chosen="richest in CPU",
)


@pytest.fixture(params=[pytest.param(PLAIN, id="a-plain-policy"), pytest.param(LEARNING, id="a-policy-that-learns")])
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new policy: its nodes are those with most CPU, and its cards the last ones."""
    monkeypatch.setitem(POLICIES, "new", request.param)
    return "new"


def test_every_name_that_a_pod_may_write_has_a_row_and_every_row_has_a_name() -> None:
    assert set(POLICIES) == set(POLICY_NAMES)
    assert DEFAULT_POLICY in POLICY_NAMES


def test_filter_and_placement_follow_the_functions_of_a_new_row(name: str) -> None:
    rig = Rig(node("n1", cpu="8").cards(2, size=16), node("n2", cpu="64").cards(2, size=16), policy=name)
    rig.arrive(tile(4))
    assert rig.filter().names == ["n2"]
    placement = rig.ledger.fleet.place(wants(ask(4)), "n2", name)
    assert isinstance(placement, Placement)
    assert placement.containers[0].tiles[0].index == 1


@pytest.mark.parametrize("row", [PLAIN, LEARNING], ids=["a-plain-policy", "a-policy-that-learns"])
def test_the_demo_shows_the_words_of_the_row(row: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, DEFAULT_POLICY, row)
    assert f"richest in CPU of 3 feasible nodes ({DEFAULT_POLICY})" in CliRunner().invoke(cli, ["demo"]).output


@pytest.mark.parametrize("leave", [(), ("--leave",)], ids=["until-full", "with-pods-that-leave"])
def test_a_new_row_can_be_simulated(name: str, leave: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_text(NODES)
    (tmp_path / "pods.csv").write_text(PODS)
    files = ("--nodes", str(tmp_path / "nodes.csv"), "--pods", str(tmp_path / "pods.csv"))
    done = CliRunner().invoke(cli, ["simulate", *files, "--policy", name, "--seeds", "1", "--jobs", "1", *leave])
    assert done.exit_code == 0, done.output
    assert "\nnew " in done.output
