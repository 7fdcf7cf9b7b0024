"""Reads and writes of a node's agent: limited to the node, and a heartbeat that survives a conflict."""

from contextlib import aclosing

import pytest

from gputile.kube.api import ApiRejected, Snapshot
from gputile.kube.node_client import NodeClient, NodeLease
from tests.kube.server import fails, pod, responds
from tests.kube.test_client import serving


async def test_only_pods_of_the_node_are_watched() -> None:
    listed = responds(200, {"metadata": {"resourceVersion": "5"}, "items": [pod("a")]})
    async with serving(listed) as (client, server), aclosing(NodeClient(client, "n1").follow_pods()) as seen:
        first = await anext(seen)
    assert isinstance(first, Snapshot)
    assert [item.name for item in first.items] == ["a"]
    assert server.requests[0].query["fieldSelector"] == "spec.nodeName=n1"


async def test_only_the_node_itself_is_watched() -> None:
    listed = responds(200, {"metadata": {"resourceVersion": "5"}, "items": [{"metadata": {"name": "n1"}}]})
    async with serving(listed) as (client, server), aclosing(NodeClient(client, "n1").follow_node()) as seen:
        await anext(seen)
    assert server.requests[0].query["fieldSelector"] == "metadata.name=n1"


async def test_patches_of_the_node() -> None:
    async with serving(responds(200, {}), responds(200, {})) as (client, server):
        node = NodeClient(client, "n1")
        await node.patch({"a": "1", "b": None}, {"l": "2"})
        await node.patch_status({"gputile.io/memory": 7}, [{"type": "X"}])
    first, second = server.requests
    assert (first.line, first.body) == (
        "PATCH /api/v1/nodes/n1",
        {"metadata": {"annotations": {"a": "1", "b": None}, "labels": {"l": "2"}}},
    )
    assert first.headers["Content-Type"] == "application/merge-patch+json"
    amounts = {"gputile.io/memory": "7"}
    assert (second.line, second.body) == (
        "PATCH /api/v1/nodes/n1/status",
        {"status": {"conditions": [{"type": "X"}], "capacity": amounts, "allocatable": amounts}},
    )
    assert second.headers["Content-Type"] == "application/strategic-merge-patch+json"  # conditions merge by type


def lease(version: str) -> dict[str, object]:
    return {"metadata": {"resourceVersion": version}, "spec": {}}


async def test_the_first_beat_creates_the_lease_and_the_next_renews_it() -> None:
    script = (fails(404, "NotFound"), responds(201, lease("1")), responds(200, lease("2")), responds(200, lease("3")))
    async with serving(*script) as (client, server):
        heartbeat = NodeLease(client.leases("gputile-agents", "n1"), "n1", 9)
        await heartbeat.beat(0.5)
        await heartbeat.beat(3.5)
    assert [request.method for request in server.requests] == ["GET", "POST", "PUT", "PUT"]
    last = server.requests[-1].body
    assert last["metadata"]["resourceVersion"] == "2"
    assert last["spec"]["holderIdentity"] == "n1"
    assert last["spec"]["leaseDurationSeconds"] == 9
    assert last["spec"]["renewTime"] == "1970-01-01T00:00:03.500000Z"


async def test_after_a_conflict_the_lease_is_read_again() -> None:
    script = (responds(200, lease("1")), fails(409, "Conflict"), responds(200, lease("7")), responds(200, lease("8")))
    async with serving(*script) as (client, server):
        heartbeat = NodeLease(client.leases("gputile-agents", "n1"), "n1", 9)
        with pytest.raises(ApiRejected):
            await heartbeat.beat(0)
        await heartbeat.beat(1)
    assert server.requests[-1].body["metadata"]["resourceVersion"] == "7"


async def test_withdrawing_clears_the_holder() -> None:
    async with serving(responds(200, lease("1")), responds(200, lease("2"))) as (client, server):
        await NodeLease(client.leases("gputile-agents", "n1"), "n1", 9).withdraw(0)
    assert server.requests[-1].body["spec"]["holderIdentity"] == ""


async def test_the_usage_annotation_is_written_and_removed_with_the_beat() -> None:
    script = (fails(404, "NotFound"), *(responds(200, lease(str(n))) for n in range(1, 5)))
    async with serving(*script) as (client, server):
        heartbeat = NodeLease(client.leases("gputile-agents", "n1"), "n1", 9)
        await heartbeat.beat(0, "use-1")
        await heartbeat.beat(1)
        await heartbeat.withdraw(2)
    written = [request.body["metadata"].get("annotations") for request in server.requests[1:]]
    assert written == [{"gputile.io/use": "use-1"}, {"gputile.io/use": "use-1"}, None, None]
