"""The node is written when it differs from its desired status, and only then."""

from typing import Any, cast

import msgspec
import pytest

from gputile.agent.node_reporter import REWRITE_AFTER, DesiredNodeStatus, NodeReporter
from gputile.dialects.kube_objects import NodeObject
from gputile.kube.node_client import NodeClient
from gputile.telemetry.agent_metrics import AgentMetrics


class RecordingClient:
    """A node client that records the writes."""

    def __init__(self) -> None:
        self.resources: list[dict[str, int | None]] = []
        self.conditions: list[dict[str, Any]] = []
        self.patches = 0

    async def patch(self, annotations: object, labels: object) -> None:
        self.patches += 1

    async def patch_status(self, resources: dict[str, int | None], conditions: list[dict[str, Any]]) -> None:
        self.resources.append(resources)
        self.conditions += conditions


def node(**allocatable: str) -> NodeObject:
    resources = {key.replace("__", "/").replace("_", "."): value for key, value in allocatable.items()}
    return msgspec.convert({"metadata": {"name": "n1"}, "status": {"allocatable": resources}}, NodeObject)


@pytest.fixture
def api() -> RecordingClient:
    return RecordingClient()


@pytest.fixture
def reporter(api: RecordingClient) -> NodeReporter:
    return NodeReporter(cast(NodeClient, api), AgentMetrics())


async def settled(reporter: NodeReporter, api: RecordingClient, desired: DesiredNodeStatus, node: NodeObject) -> None:
    """A first step that writes the condition; its other writes are cleared."""
    reporter.seen(node)
    reporter.desired = desired
    await reporter.step(0)
    api.resources.clear()


@pytest.mark.parametrize(
    "quantity", [pytest.param("1000", id="as-we-write-it"), pytest.param("1k", id="as-the-API-server-writes-it")]
)
async def test_resources_are_compared_as_quantities(
    reporter: NodeReporter, api: RecordingClient, quantity: str
) -> None:
    desired, actual = DesiredNodeStatus(resources={"gputile.io/cores": 1000}), node(gputile_io__cores=quantity)
    await settled(reporter, api, desired, actual)
    await reporter.step(1)
    assert api.resources == []


async def test_while_the_watch_is_late_nothing_is_written_again(reporter: NodeReporter, api: RecordingClient) -> None:
    reporter.seen(node())
    reporter.desired = DesiredNodeStatus(resources={"gputile.io/cores": 400}, labels={"gputile.io/gpus": "4"})
    for second in range(int(REWRITE_AFTER)):
        await reporter.step(second)
    assert (api.patches, len(api.resources)) == (1, 1)
    await reporter.step(REWRITE_AFTER)
    assert (api.patches, len(api.resources)) == (2, 2)
    reporter.desired = DesiredNodeStatus(resources={"gputile.io/cores": 300})
    await reporter.step(REWRITE_AFTER + 1)
    assert api.resources[-1] == {"gputile.io/cores": 300}


async def test_resources_of_removed_gpus_are_removed(reporter: NodeReporter, api: RecordingClient) -> None:
    actual = node(gputile_io__cores="400", gputile_io__gpu="0", cpu="8", example_com__other="1")
    await settled(reporter, api, DesiredNodeStatus(resources={"gputile.io/cores": 400}), actual)
    reporter.desired = DesiredNodeStatus()
    await reporter.step(1)
    assert api.resources == [{"gputile.io/cores": None}]


async def test_a_recreated_node_gets_the_condition_again(reporter: NodeReporter, api: RecordingClient) -> None:
    await settled(reporter, api, DesiredNodeStatus(), node())
    reporter.gone()
    reporter.seen(node())
    await reporter.step(1)
    assert len(api.conditions) == 2


async def test_the_transition_time_changes_only_with_the_status(reporter: NodeReporter, api: RecordingClient) -> None:
    await settled(reporter, api, DesiredNodeStatus(is_well=False, message="one"), node())
    for at, desired in (
        (10, DesiredNodeStatus(is_well=False, message="two")),
        (20, DesiredNodeStatus(message="three")),
    ):
        reporter.desired = desired
        await reporter.step(at)
    assert ["lastTransitionTime" in condition for condition in api.conditions] == [True, False, True]
