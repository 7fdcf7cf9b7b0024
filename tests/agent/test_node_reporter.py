"""What the node says of itself is written when it differs, and only then."""

from typing import Any, cast

import msgspec
import pytest

from gputile.agent.node_reporter import AGAIN, DesiredNodeStatus, NodeReporter
from gputile.dialects.kube_objects import NodeObject
from gputile.kube.node_client import NodeClient
from gputile.telemetry.agent_metrics import AgentMetrics


class Written:
    """The part of a node's client that writes."""

    def __init__(self) -> None:
        self.sums: list[dict[str, int | None]] = []
        self.conditions: list[dict[str, Any]] = []
        self.patches = 0

    async def patch(self, annotations: object, labels: object) -> None:
        self.patches += 1

    async def patch_status(self, resources: dict[str, int | None], conditions: list[dict[str, Any]]) -> None:
        self.sums.append(resources)
        self.conditions += conditions


def node(**allocatable: str) -> NodeObject:
    said = {key.replace("__", "/").replace("_", "."): value for key, value in allocatable.items()}
    return msgspec.convert({"metadata": {"name": "n1"}, "status": {"allocatable": said}}, NodeObject)


@pytest.fixture
def api() -> Written:
    return Written()


@pytest.fixture
def reporter(api: Written) -> NodeReporter:
    return NodeReporter(cast(NodeClient, api), AgentMetrics())


async def settled(reporter: NodeReporter, api: Written, wanted: DesiredNodeStatus, there: NodeObject) -> None:
    """The condition is written, and is of no interest any more."""
    reporter.seen(there)
    reporter.wanted = wanted
    await reporter.step(0)
    api.sums.clear()


@pytest.mark.parametrize(
    "spelt", [pytest.param("1000", id="as-we-write-it"), pytest.param("1k", id="as-the-API-server-writes-it")]
)
async def test_a_sum_is_compared_as_an_amount(reporter: NodeReporter, api: Written, spelt: str) -> None:
    wanted, there = DesiredNodeStatus(resources={"gputile.io/cores": 1000}), node(gputile_io__cores=spelt)
    await settled(reporter, api, wanted, there)
    await reporter.step(1)
    assert api.sums == []


async def test_while_our_watch_is_late_the_same_is_not_written_again(reporter: NodeReporter, api: Written) -> None:
    reporter.seen(node())
    reporter.wanted = DesiredNodeStatus(resources={"gputile.io/cores": 400}, labels={"gputile.io/gpus": "4"})
    for second in range(int(AGAIN)):
        await reporter.step(second)
    assert (api.patches, len(api.sums)) == (1, 1)
    await reporter.step(AGAIN)
    assert (api.patches, len(api.sums)) == (2, 2)
    reporter.wanted = DesiredNodeStatus(resources={"gputile.io/cores": 300})
    await reporter.step(AGAIN + 1)
    assert api.sums[-1] == {"gputile.io/cores": 300}


async def test_sums_of_cards_that_are_gone_are_taken_away(reporter: NodeReporter, api: Written) -> None:
    there = node(gputile_io__cores="400", gputile_io__gpu="0", cpu="8", example_com__other="1")
    await settled(reporter, api, DesiredNodeStatus(resources={"gputile.io/cores": 400}), there)
    reporter.wanted = DesiredNodeStatus()
    await reporter.step(1)
    assert api.sums == [{"gputile.io/cores": None}]


async def test_a_node_that_was_made_anew_hears_the_condition_again(reporter: NodeReporter, api: Written) -> None:
    await settled(reporter, api, DesiredNodeStatus(), node())
    reporter.gone()
    reporter.seen(node())
    await reporter.step(1)
    assert len(api.conditions) == 2


async def test_the_time_of_a_turn_is_that_of_the_turn(reporter: NodeReporter, api: Written) -> None:
    await settled(reporter, api, DesiredNodeStatus(is_well=False, message="one"), node())
    for at, wanted in ((10, DesiredNodeStatus(is_well=False, message="two")), (20, DesiredNodeStatus(message="three"))):
        reporter.wanted = wanted
        await reporter.step(at)
    assert ["lastTransitionTime" in one for one in api.conditions] == [True, False, True]
