"""Lists, tables and watches, in the formats of kubectl, client-go and older clients."""

import asyncio

import pytest

from gputile.metrics_api.status import StatusError
from gputile.testing.builders import node
from tests.metrics_api.rig import OLD_ROOT, ROOT, TABLE, ProjectionRig

PODS, NODES = f"{ROOT}/podresources", f"{ROOT}/gpuinfos"


async def rig_with(*names: str, history: int = 1000) -> ProjectionRig:
    rig = ProjectionRig(history=history)
    await rig.look()
    for index, name in enumerate(names):
        await rig.run(name, 2, index % 2)
    return rig


# ---- lists ----------------------------------------------------------------------------------------------------------


async def test_a_list_is_a_list_of_its_kind() -> None:
    rig = await rig_with("b", "a")
    listed = await rig.listed(PODS)
    assert (listed["kind"], listed["apiVersion"]) == ("PodResourceList", "metrics.nvidia.com/v1alpha1")
    assert [item["metadata"]["name"] for item in listed["items"]] == ["a", "b"]
    newest = max(int(item["metadata"]["resourceVersion"]) for item in listed["items"])
    assert newest == int(listed["metadata"]["resourceVersion"])


async def test_an_empty_list_has_items() -> None:
    assert (await (await rig_with()).listed(PODS))["items"] == []
    assert (await (await rig_with()).listed(f"{PODS}?events=v0.1")) == {
        "kind": "List",
        "apiVersion": "v1",
        "items": [],
    }


@pytest.mark.parametrize(
    ("query", "want"),
    [
        pytest.param("", ["a1", "b1"], id="all-namespaces"),
        pytest.param("namespaces/team-a/", ["a1"], id="one-namespace"),
        pytest.param("?fieldSelector=metadata.namespace=team-b", ["b1"], id="a-namespace-by-field"),
        pytest.param("?fieldSelector=spec.nodeName=n2", ["b1"], id="by-node"),
        pytest.param("?labelSelector=app=x", ["a1"], id="by-label"),
        pytest.param("?labelSelector=app=x&fieldSelector=node=n2", [], id="both"),
    ],
)
async def test_selectors(query: str, want: list[str]) -> None:
    rig = ProjectionRig()
    await rig.look()
    await rig.run("a1", namespace="team-a", labels={"app": "x"})
    await rig.run("b1", namespace="team-b", on="n2")
    path = f"{ROOT}/{query}podresources" if query.startswith("namespaces") else f"{PODS}{query}"
    assert await rig.names(path) == want


async def test_a_list_lets_other_tasks_run() -> None:
    """Extender calls wait while a list is encoded; so it is encoded in slices."""
    rig = ProjectionRig(*(node(f"n{number:04}").cards(1) for number in range(450)))
    await rig.look()
    turns = 0

    async def yield_to_others() -> None:
        nonlocal turns
        turns += 1

    rig.handlers._yield_to_loop = yield_to_others
    assert len((await rig.listed(NODES))["items"]) == 450
    assert turns == 3


@pytest.mark.parametrize("path", [f"{NODES}/nowhere", f"{ROOT}/namespaces/b/podresources/a", f"{OLD_ROOT}/gpupods/a"])
async def test_a_missing_object_is_not_found(path: str) -> None:
    rig = await rig_with("a")
    with pytest.raises(StatusError) as error:
        rig.get(path)
    assert (error.value.code, error.value.reason) == (404, "NotFound")


async def test_tables_have_columns_and_cells() -> None:
    rig = await rig_with("a", "b")
    listed = await rig.listed(NODES, TABLE)
    names = [column["name"] for column in listed["columnDefinitions"]]
    cells = dict(zip(names, listed["rows"][0]["cells"], strict=True))
    assert (listed["kind"], listed["apiVersion"]) == ("Table", "meta.k8s.io/v1")
    assert cells["Name"] == "n1"
    assert (cells["GPUs"], cells["Busy"], cells["Memory"]) == (2, 2, "4/32Mi")
    assert cells["Models"] == "2x Tesla T4"
    assert listed["rows"][0]["object"]["kind"] == "PartialObjectMetadata"
    assert listed["metadata"]["resourceVersion"] == await rig.version(NODES)
    pods = await rig.listed(f"{PODS}?includeObject=Object", TABLE)
    assert pods["rows"][0]["cells"][:7] == ["a", "n1", "Pending", "0", "2Mi", "shared", ""]
    assert pods["rows"][0]["object"]["kind"] == "PodResource"
    assert "object" not in (await rig.listed(f"{PODS}?includeObject=None", TABLE))["rows"][0]
    table = rig.get(f"{NODES}/n1", TABLE)
    assert [row["cells"][0] for row in table["rows"]] == ["n1"]


async def test_partial_object_metadata() -> None:
    rig = await rig_with("a")
    accept = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
    listed = await rig.listed(PODS, accept)
    assert (listed["kind"], listed["apiVersion"]) == ("PartialObjectMetadataList", "meta.k8s.io/v1")
    assert set(listed["items"][0]) == {"kind", "apiVersion", "metadata"}


# ---- watches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("query", ["", "&resourceVersion=0"], ids=["unset", "0"])
async def test_a_watch_without_a_version_begins_with_all_objects(query: str) -> None:
    rig = await rig_with("a", "b")
    watch = rig.watch(f"{PODS}?watch=true{query}")
    assert await watch.events(2) == [("ADDED", "a"), ("ADDED", "b")]
    await rig.end("default/a")
    assert await watch.events(1) == [("DELETED", "a")]


async def test_a_watch_continues_after_the_list_and_resumes_after_a_disconnect() -> None:
    rig = await rig_with("a")
    watch = rig.watch(f"{PODS}?watch=1&resourceVersion={await rig.version(PODS)}")
    await rig.run("b", 2, 1)
    last = await watch.next()
    assert (last["type"], last["object"]["metadata"]["name"]) == ("ADDED", "b")
    await watch.close()
    rig.scheduler.change("b", status={"phase": "Running"})
    await rig.look()
    await rig.end("default/a")
    again = rig.watch(f"{PODS}?watch=1&resourceVersion={last['object']['metadata']['resourceVersion']}")
    assert await again.events(2) == [("MODIFIED", "b"), ("DELETED", "a")]


@pytest.mark.parametrize("version", ["5", "nonsense", "1" * 5000], ids=["another-replicas", "no-number", "too-long"])
async def test_a_foreign_version_is_expired_at_once(version: str) -> None:
    rig = await rig_with("a")
    with pytest.raises(StatusError) as error:
        rig.watch(f"{PODS}?watch=1&resourceVersion={version}")
    assert (error.value.code, error.value.reason) == (410, "Expired")


async def test_a_version_of_another_replica_is_expired() -> None:
    rig, other = await rig_with("a"), ProjectionRig(mark=8)
    with pytest.raises(StatusError):
        rig.watch(f"{PODS}?watch=1&resourceVersion={await other.version(PODS)}")


async def test_a_slow_watch_is_ended_and_never_misses_a_change() -> None:
    rig = await rig_with("a", history=5)
    watch = rig.watch(f"{PODS}?watch=1&resourceVersion={await rig.version(PODS)}")
    rig.scheduler.change("a", status={"phase": "Running"})
    await rig.look()
    assert await watch.events(1) == [("MODIFIED", "a")]
    for number in range(8):
        await rig.run(f"n{number}", 1, 1)
    (last,) = await watch.rest()
    assert (last["type"], last["object"]["code"], last["object"]["reason"]) == ("ERROR", 410, "Expired")


async def test_initial_events_end_with_a_bookmark() -> None:
    rig = await rig_with("a")
    query = "watch=1&sendInitialEvents=true&allowWatchBookmarks=true&resourceVersionMatch=NotOlderThan"
    watch = rig.watch(f"{PODS}?{query}")
    assert await watch.events(1) == [("ADDED", "a")]
    mark = await watch.next()
    assert (mark["type"], mark["object"]["kind"]) == ("BOOKMARK", "PodResource")
    metadata = mark["object"]["metadata"]
    assert metadata["annotations"] == {"k8s.io/initial-events-end": "true"}
    assert metadata["resourceVersion"] == await rig.version(PODS)


async def test_without_initial_events_only_changes_are_sent() -> None:
    rig = await rig_with("a")
    watch = rig.watch(f"{PODS}?watch=1&sendInitialEvents=false")
    await rig.run("b", 2, 1)
    assert await watch.events(1) == [("ADDED", "b")]


@pytest.mark.parametrize(
    ("query", "count"), [("&allowWatchBookmarks=true", 1), ("", 0)], ids=["requested", "not-requested"]
)
async def test_bookmarks_come_while_nothing_happens(query: str, count: int) -> None:
    rig = await rig_with("a")
    rig.handlers.bookmark = 0.001
    version = await rig.version(PODS)
    watch = rig.watch(f"{PODS}?watch=1&resourceVersion={version}{query}")
    async with asyncio.timeout(1):
        if count:
            assert (await watch.next())["object"]["metadata"]["resourceVersion"] == version
        rig.projection.close_watches()
        rest = await watch.rest()
    assert all(event["type"] == "BOOKMARK" for event in rest)
    assert bool(rest) <= bool(count)


@pytest.mark.parametrize("query", ["", "&labelSelector=app=none"], ids=["events-for-all", "events-for-others"])
async def test_bookmarks_come_while_much_happens(query: str) -> None:
    rig = await rig_with("a")
    rig.handlers.bookmark = 0.05
    version = await rig.version(PODS)
    watch = rig.watch(f"{PODS}?watch=1&allowWatchBookmarks=true&resourceVersion={version}{query}")
    busy = asyncio.create_task(keep_busy(rig))
    async with asyncio.timeout(2):
        while (event := await watch.next())["type"] != "BOOKMARK":
            pass
    assert not busy.done(), "bookmarks do not wait for a pause in changes"
    assert int(event["object"]["metadata"]["resourceVersion"]) > int(version)
    busy.cancel()
    await asyncio.gather(busy, return_exceptions=True)


async def keep_busy(rig: ProjectionRig) -> None:
    """No two changes are further apart than a bookmark."""
    for number in range(1000):
        rig.scheduler.change("a", status={"phase": ("Running", "Pending")[number % 2]})
        await rig.look()
        await asyncio.sleep(0.005)


@pytest.mark.parametrize(("seconds", "stops"), [(1, False), (60, True)], ids=["by-its-time", "because-we-stop"])
async def test_a_watch_ends_although_it_never_catches_up(seconds: int, stops: bool) -> None:
    rig = await rig_with("a")
    watch = rig.watch(f"{PODS}?watch=1&timeoutSeconds={seconds}&resourceVersion={await rig.version(PODS)}")

    async def yield_to_others() -> None:
        """While one chunk is written, the next changes arrive."""
        rig.scheduler.change("a", metadata={"labels": {"n": str(rig.projection.pods.version)}})
        await rig.look()
        if stops:
            rig.projection.close_watches()
        await asyncio.sleep(0.01)

    rig.handlers._yield_to_loop = yield_to_others
    await yield_to_others()
    async with asyncio.timeout(3):
        assert bool(await watch.rest()) is not stops


async def test_a_watch_that_resumes_far_behind_lets_other_tasks_run() -> None:
    rig = await rig_with("a")
    version = await rig.version(PODS)
    for number in range(250):
        rig.projection.pods.put(("default", f"p{number:03}"), str(number), {"metadata": {"name": f"p{number:03}"}})
    turns = 0

    async def yield_to_others() -> None:
        nonlocal turns
        turns += 1

    rig.handlers._yield_to_loop = yield_to_others
    watch = rig.watch(f"{PODS}?watch=1&resourceVersion={version}&labelSelector=app=none&timeoutSeconds=1")
    assert await watch.rest() == []
    assert turns == 3


async def test_a_watch_ends_after_its_timeout() -> None:
    rig = await rig_with("a")
    watch = rig.watch(f"{PODS}?watch=1&timeoutSeconds=1")
    began = asyncio.get_running_loop().time()
    assert [event["type"] for event in await watch.rest()] == ["ADDED"]
    assert 0.9 < asyncio.get_running_loop().time() - began < 5


async def test_selectors_turn_changes_into_added_and_deleted_events() -> None:
    rig = await rig_with("a")
    version = await rig.version(PODS)
    watch = rig.watch(f"{PODS}?watch=1&resourceVersion={version}&fieldSelector=status.phase=Running")
    rig.scheduler.change("a", status={"phase": "Running"})
    await rig.look()
    rig.scheduler.change("a", status={"phase": "Pending"})
    await rig.look()
    assert await watch.events(2) == [("ADDED", "a"), ("DELETED", "a")]


async def test_a_watched_table_has_one_row_per_event() -> None:
    rig = await rig_with("a")
    watch = rig.watch(f"{PODS}?watch=1", TABLE)
    event = await watch.next()
    assert (event["type"], event["object"]["kind"]) == ("ADDED", "Table")
    assert [row["cells"][0] for row in event["object"]["rows"]] == ["a"]
    assert event["object"]["columnDefinitions"]


# ---- older clients --------------------------------------------------------------------------------------------------


async def test_the_stream_of_v0_1() -> None:
    rig = await rig_with("a")
    watch = rig.watch(f"{PODS}?watch=true&events=v0.1")
    first = await watch.next()
    assert set(first) == {"Type", "Object"}
    assert (first["Type"], first["Object"]["apiVersion"], first["Object"]["kind"]) == (
        "SYNCED",
        "v1alpha1",
        "PodResource",
    )
    rig.scheduler.change("a", status={"phase": "Running"})
    await rig.look()
    assert (await watch.next())["Type"] == "SYNCED"
    await rig.end("default/a")
    last = await watch.next()
    assert last["Type"] == "DELETED"
    assert last["Object"]["spec"] == {"pod_name": "a", "pod_namespace": "default"}


@pytest.mark.parametrize(("path", "kind"), [("gpupods", "GpuPod"), ("gpunodes", "GpuNode")])
async def test_the_stream_of_v0_2(path: str, kind: str) -> None:
    rig = await rig_with("a")
    first = await rig.watch(f"{OLD_ROOT}/{path}?watch=true").next()
    assert set(first) == {"Type", kind}
    assert first["Type"] == "SYNCED"


async def test_the_old_stream_just_ends_for_a_slow_watch() -> None:
    rig = await rig_with("a", history=3)
    watch = rig.watch(f"{PODS}?watch=true&events=v0.1")
    await watch.next()
    for number in range(8):
        await rig.run(f"n{number}", 1, 1)
    assert await watch.rest() == []
