"""The cluster in memory keeps the promises that the scheduler rests on."""

import asyncio
from typing import Any

import pytest

from gputile.kube.api import Api, ApiRejected, Binding, Change, KubeEvent, LeaseRenewal, Snapshot, Undecodable
from gputile.kube.fake import MemoryApi
from gputile.testing.builders import node, pod


def api(*pods: dict[str, Any]) -> MemoryApi:
    return MemoryApi([node("n1").card().manifest()], pods)


def binding(**changes: Any) -> Binding:
    said = {"namespace": "default", "name": "web-0", "uid": "uid-1", "node": "n1"} | changes
    return Binding(**said, annotations={"a": "1"}, labels={"l": "2"})


async def first(feed: Any, count: int) -> list[Any]:
    async with asyncio.timeout(1):
        return [await anext(feed) for _ in range(count)]


async def test_it_is_an_api() -> None:
    found: Api = api()
    await found.close()


class TestBinding:
    async def test_node_annotations_and_labels_are_written_at_once(self) -> None:
        found = api(pod(annotations={"b": "3"}))
        feed = found.follow_pods()
        await first(feed, 1)
        await found.bind(binding(), 1.0)
        (change,) = await first(feed, 1)
        assert change.kind == "MODIFIED"
        assert (change.item.node_name, change.item.annotations) == ("n1", {"a": "1", "b": "3"})
        assert change.item.labels == {"l": "2"}

    async def test_a_second_one_gets_409_and_changes_nothing(self) -> None:
        found = api(pod())
        await found.bind(binding(), 1.0)
        with pytest.raises(ApiRejected, match="already assigned to node n1") as no:
            await found.bind(binding(node="n2"), 1.0)
        assert no.value.status == 409
        assert found.pods["default/web-0"]["spec"]["nodeName"] == "n1"

    @pytest.mark.parametrize(
        ("changes", "status"), [({"uid": "uid-2"}, 409), ({"name": "web-1"}, 404), ({"namespace": "ml"}, 404)]
    )
    async def test_the_pod_must_be_the_one_that_was_meant(self, changes: dict[str, str], status: int) -> None:
        found = api(pod())
        with pytest.raises(ApiRejected) as no:
            await found.bind(binding(**changes), 1.0)
        assert no.value.status == status
        assert not found.pods["default/web-0"]["spec"]["nodeName"]


class TestPatching:
    async def test_sets_and_removes(self) -> None:
        found = api(pod(annotations={"a": "1", "b": "2"}, labels={"l": "1"}))
        await found.patch_pod("default", "web-0", "uid-1", {"a": None, "c": "3"}, {"m": "2"})
        metadata = found.pods["default/web-0"]["metadata"]
        assert (metadata["annotations"], metadata["labels"]) == ({"b": "2", "c": "3"}, {"l": "1", "m": "2"})

    async def test_not_another_pod_of_that_name(self) -> None:
        found = api(pod())
        with pytest.raises(ApiRejected):
            await found.patch_pod("default", "web-0", "uid-2", {"a": "1"}, {})

    async def test_evicting_removes(self) -> None:
        found = api(pod())
        await found.evict("default", "web-0", "uid-1")
        assert await found.pod("default", "web-0") is None
        with pytest.raises(ApiRejected):
            await found.evict("default", "web-0", "uid-1")

    async def test_notes_are_kept(self) -> None:
        found = api()
        note = KubeEvent(namespace="default", pod="web-0", uid="uid-1", reason="Because", message="so")
        await found.note(note)
        assert found.notes == [note]


class TestFollowing:
    async def test_a_list_and_then_every_change_in_order(self) -> None:
        found = api(pod())
        feed = found.follow_pods()
        (listed,) = await first(feed, 1)
        assert isinstance(listed, Snapshot)
        assert [one.name for one in listed.items] == ["web-0"]
        found.add_pod(pod(name="web-1"))
        found.add_pod(pod(name="web-1", labels={"a": "b"}))
        found.delete_pod("default/web-1")
        assert [(change.kind, change.item.name) for change in await first(feed, 3)] == [
            ("ADDED", "web-1"),
            ("MODIFIED", "web-1"),
            ("DELETED", "web-1"),
        ]

    async def test_nodes_too(self) -> None:
        found = api()
        feed = found.follow_nodes()
        await first(feed, 1)
        found.add_node(node("n2").manifest())
        found.add_node(node("n1").manifest())
        found.delete_node("n1")
        assert [(change.kind, change.item.name) for change in await first(feed, 3)] == [
            ("ADDED", "n2"),
            ("MODIFIED", "n1"),
            ("DELETED", "n1"),
        ]

    async def test_leases_too(self) -> None:
        found = api()
        found.add_lease("n1", holderIdentity="n1", renewTime="1")
        feed = found.follow_leases("any")
        (listed,) = await first(feed, 1)
        assert [(lease.name, lease.beat.renew_time) for lease in listed.items] == [("n1", "1")]
        found.add_lease("n1", renewTime="2")
        found.delete_lease("n1")
        changes = await first(feed, 2)
        assert [(change.kind, change.item.beat) for change in changes] == [
            ("MODIFIED", LeaseRenewal("n1", None, "2")),
            ("DELETED", LeaseRenewal("n1", None, "2")),
        ]

    async def test_everybody_who_follows_hears_everything(self) -> None:
        found = api()
        feeds = [found.follow_pods() for _ in range(2)]
        for feed in feeds:
            await first(feed, 1)
        found.add_pod(pod())
        for feed in feeds:
            assert isinstance((await first(feed, 1))[0], Change)

    async def test_what_was_told_does_not_change_later(self) -> None:
        found = api()
        feed = found.follow_pods()
        await first(feed, 1)
        found.add_pod(pod())
        await found.bind(binding(), 1.0)
        added, bound = await first(feed, 2)
        assert (added.item.node_name, bound.item.node_name) == ("", "n1")

    async def test_an_object_that_cannot_be_read_is_named_and_left_out(self) -> None:
        odd = {"metadata": {"name": "odd"}, "spec": []}
        found = api(pod())
        found.pods["default/odd"] = odd
        feed = found.follow_pods()
        spoilt, listed = await first(feed, 2)
        assert isinstance(spoilt, Undecodable)
        assert spoilt.what == "Pod odd"
        assert [one.name for one in listed.items] == ["web-0"]
        assert [one.name for one in await found.list_pods()] == ["web-0"]
        found._notify("Pod", "ADDED", odd)
        assert isinstance((await first(feed, 1))[0], Undecodable)


class TestObjects:
    async def test_a_pod_without_a_uid_gets_one(self) -> None:
        made = pod()
        del made["metadata"]["uid"]
        del made["metadata"]["namespace"]
        found = api(made)
        live = await found.pod("default", "web-0")
        assert live is not None
        assert live.uid

    async def test_what_is_put_in_stays_the_callers(self) -> None:
        made = pod()
        found = api(made)
        await found.bind(binding(), 1.0)
        assert made["spec"]["nodeName"] is None

    async def test_listing_and_looking_agree(self) -> None:
        found = api(pod(), pod(name="web-1", uid="uid-2"))
        assert {one.name for one in await found.list_pods()} == {"web-0", "web-1"}
        assert await found.pod("default", "web-2") is None

    async def test_a_pod_made_anew_is_another_pod(self) -> None:
        nameless = pod()
        del nameless["metadata"]["uid"]
        found = api()
        before = found.add_pod(nameless)
        found.delete_pod("default/web-0")
        assert found.add_pod(nameless).uid != before.uid
