"""The in-memory API server gives the guarantees that the scheduler relies on."""

import asyncio
from typing import Any

import pytest

from gputile.kube.api import Api, ApiRejected, Binding, Change, KubeEvent, LeaseRenewal, Snapshot, Undecodable
from gputile.kube.fake import MemoryApi
from gputile.testing.builders import node, pod


def api(*pods: dict[str, Any]) -> MemoryApi:
    return MemoryApi([node("n1").card().manifest()], pods)


def binding(**changes: Any) -> Binding:
    fields = {"namespace": "default", "name": "web-0", "uid": "uid-1", "node": "n1"} | changes
    return Binding(**fields, annotations={"a": "1"}, labels={"l": "2"})


async def first(feed: Any, count: int) -> list[Any]:
    async with asyncio.timeout(1):
        return [await anext(feed) for _ in range(count)]


async def test_it_is_an_api() -> None:
    server: Api = api()
    await server.close()


class TestBinding:
    async def test_node_annotations_and_labels_are_written_in_one_change(self) -> None:
        server = api(pod(annotations={"b": "3"}))
        feed = server.follow_pods()
        await first(feed, 1)
        await server.bind(binding(), 1.0)
        (change,) = await first(feed, 1)
        assert change.kind == "MODIFIED"
        assert (change.item.node_name, change.item.annotations) == ("n1", {"a": "1", "b": "3"})
        assert change.item.labels == {"l": "2"}

    async def test_a_second_binding_gets_409_and_changes_nothing(self) -> None:
        server = api(pod())
        await server.bind(binding(), 1.0)
        with pytest.raises(ApiRejected, match="already assigned to node n1") as caught:
            await server.bind(binding(node="n2"), 1.0)
        assert caught.value.status == 409
        assert server.pods["default/web-0"]["spec"]["nodeName"] == "n1"

    @pytest.mark.parametrize(
        ("changes", "status"), [({"uid": "uid-2"}, 409), ({"name": "web-1"}, 404), ({"namespace": "ml"}, 404)]
    )
    async def test_a_binding_to_another_pod_is_rejected(self, changes: dict[str, str], status: int) -> None:
        server = api(pod())
        with pytest.raises(ApiRejected) as caught:
            await server.bind(binding(**changes), 1.0)
        assert caught.value.status == status
        assert not server.pods["default/web-0"]["spec"]["nodeName"]


class TestPatching:
    async def test_sets_and_removes(self) -> None:
        server = api(pod(annotations={"a": "1", "b": "2"}, labels={"l": "1"}))
        await server.patch_pod("default", "web-0", "uid-1", {"a": None, "c": "3"}, {"m": "2"})
        metadata = server.pods["default/web-0"]["metadata"]
        assert (metadata["annotations"], metadata["labels"]) == ({"b": "2", "c": "3"}, {"l": "1", "m": "2"})

    async def test_another_pod_of_that_name_is_not_patched(self) -> None:
        server = api(pod())
        with pytest.raises(ApiRejected):
            await server.patch_pod("default", "web-0", "uid-2", {"a": "1"}, {})

    async def test_evicting_removes(self) -> None:
        server = api(pod())
        await server.evict("default", "web-0", "uid-1")
        assert await server.pod("default", "web-0") is None
        with pytest.raises(ApiRejected):
            await server.evict("default", "web-0", "uid-1")

    async def test_events_are_recorded(self) -> None:
        server = api()
        note = KubeEvent(namespace="default", pod="web-0", uid="uid-1", reason="Because", message="so")
        await server.note(note)
        assert server.notes == [note]


class TestFollowing:
    async def test_a_list_and_then_every_change_in_order(self) -> None:
        server = api(pod())
        feed = server.follow_pods()
        (listed,) = await first(feed, 1)
        assert isinstance(listed, Snapshot)
        assert [item.name for item in listed.items] == ["web-0"]
        server.add_pod(pod(name="web-1"))
        server.add_pod(pod(name="web-1", labels={"a": "b"}))
        server.delete_pod("default/web-1")
        assert [(change.kind, change.item.name) for change in await first(feed, 3)] == [
            ("ADDED", "web-1"),
            ("MODIFIED", "web-1"),
            ("DELETED", "web-1"),
        ]

    async def test_nodes_too(self) -> None:
        server = api()
        feed = server.follow_nodes()
        await first(feed, 1)
        server.add_node(node("n2").manifest())
        server.add_node(node("n1").manifest())
        server.delete_node("n1")
        assert [(change.kind, change.item.name) for change in await first(feed, 3)] == [
            ("ADDED", "n2"),
            ("MODIFIED", "n1"),
            ("DELETED", "n1"),
        ]

    async def test_leases_too(self) -> None:
        server = api()
        server.add_lease("n1", holderIdentity="n1", renewTime="1")
        feed = server.follow_leases("any")
        (listed,) = await first(feed, 1)
        assert [(lease.name, lease.beat.renew_time) for lease in listed.items] == [("n1", "1")]
        server.add_lease("n1", renewTime="2")
        server.delete_lease("n1")
        changes = await first(feed, 2)
        assert [(change.kind, change.item.beat) for change in changes] == [
            ("MODIFIED", LeaseRenewal("n1", None, "2")),
            ("DELETED", LeaseRenewal("n1", None, "2")),
        ]

    async def test_every_watch_gets_every_change(self) -> None:
        server = api()
        feeds = [server.follow_pods() for _ in range(2)]
        for feed in feeds:
            await first(feed, 1)
        server.add_pod(pod())
        for feed in feeds:
            assert isinstance((await first(feed, 1))[0], Change)

    async def test_delivered_objects_do_not_change_later(self) -> None:
        server = api()
        feed = server.follow_pods()
        await first(feed, 1)
        server.add_pod(pod())
        await server.bind(binding(), 1.0)
        added, bound = await first(feed, 2)
        assert (added.item.node_name, bound.item.node_name) == ("", "n1")

    async def test_an_undecodable_object_is_named_and_left_out(self) -> None:
        odd = {"metadata": {"name": "odd"}, "spec": []}
        server = api(pod())
        server.pods["default/odd"] = odd
        feed = server.follow_pods()
        undecodable, listed = await first(feed, 2)
        assert isinstance(undecodable, Undecodable)
        assert undecodable.what == "Pod odd"
        assert [item.name for item in listed.items] == ["web-0"]
        assert [item.name for item in await server.list_pods()] == ["web-0"]
        server._notify("Pod", "ADDED", odd)
        assert isinstance((await first(feed, 1))[0], Undecodable)


class TestObjects:
    async def test_a_pod_without_a_uid_gets_one(self) -> None:
        manifest = pod()
        del manifest["metadata"]["uid"]
        del manifest["metadata"]["namespace"]
        server = api(manifest)
        live = await server.pod("default", "web-0")
        assert live is not None
        assert live.uid

    async def test_the_callers_manifest_is_not_changed(self) -> None:
        manifest = pod()
        server = api(manifest)
        await server.bind(binding(), 1.0)
        assert manifest["spec"]["nodeName"] is None

    async def test_list_and_get_agree(self) -> None:
        server = api(pod(), pod(name="web-1", uid="uid-2"))
        assert {item.name for item in await server.list_pods()} == {"web-0", "web-1"}
        assert await server.pod("default", "web-2") is None

    async def test_a_recreated_pod_has_another_uid(self) -> None:
        nameless = pod()
        del nameless["metadata"]["uid"]
        server = api()
        before = server.add_pod(nameless)
        server.delete_pod("default/web-0")
        assert server.add_pod(nameless).uid != before.uid
