"""The objects of nodes and pods, with the keys of v0.1 and gputile's own."""

import asyncio

import pytest

from gputile.dialects.usage_annotation import USE, write_usage
from gputile.kube.api import Json
from gputile.metrics_api.objects import brand
from gputile.model.usage import CardUsage
from gputile.testing.builders import node
from tests.metrics_api.rig import OLD_ROOT, ROOT, TABLE, ProjectionRig, held


async def shown(rig: ProjectionRig, path: str) -> Json:
    await rig.look()
    return rig.get(f"{ROOT}/{path}")


async def test_a_node_has_all_the_fields_of_v0_1() -> None:
    rig = ProjectionRig(node("n1").card("Tesla T4", 16, pci="0000:3b:00.0").card("A100", 40))
    await rig.run("web", 8)
    body = rig.get(f"{ROOT}/gpuinfos/n1")
    card = {
        "device_id": "GPU-n1-0",
        "device_brand": "BRAND_TESLA",
        "device_model": "Tesla T4",
        "device_busid": "0000:3b:00.0",
        "device_node": "n1",
    }
    spec, status = body["spec"], body["status"]
    assert (body["kind"], body["apiVersion"]) == ("GpuInfo", "metrics.nvidia.com/v1alpha1")
    assert spec["device_node"] == "n1"
    assert spec["device_infos"]["GPU-n1-0"] == card
    assert spec["device_models"] == {"tesla t4": ["GPU-n1-0"], "a100": ["GPU-n1-1"]}
    assert spec["device_busy"] == ["GPU-n1-0"]
    assert spec["report_time"].startswith("2023-11-14T22:13:20")
    assert (status["node_health"], status["node_last_health_time"]) == ("UnKnow", "UnKnow")
    assert status["cards"][0]["memory"] == {"total": 16, "held": 8}
    assert [card["tenants"] for card in status["cards"]] == [1, 0]


async def test_a_pod_has_all_the_fields_of_v0_1_and_its_allocation() -> None:
    rig = ProjectionRig()
    await rig.run("web", 8, labels={"app": "web"})
    body = rig.get(f"{ROOT}/namespaces/default/podresources/web")
    (container,) = body["spec"]["containers_device"]
    (tile,) = container["device_info"]
    assert (body["spec"]["pod_name"], body["spec"]["pod_namespace"]) == ("web", "default")
    assert container["container_name"] == "c0"
    assert (tile["device_id"], tile["device_model"], tile["device_node"]) == ("GPU-n1-0", "Tesla T4", "n1")
    assert (tile["index"], tile["memory"], tile["cores"]) == (0, 8, 0)
    assert "use" not in tile, "unknown values are absent"
    assert body["status"]["last_changed_time"].startswith("2023-11-14T22:13:20")
    assert body["metadata"]["labels"] == {"app": "web"}
    assert body["metadata"]["uid"] == "uid-web"


async def test_usage_is_shown_where_the_agent_reports_it() -> None:
    rig = ProjectionRig()
    await rig.run("web")
    before = await rig.version(f"{ROOT}/podresources")
    usage = write_usage({"uid-web": {"c0": {"GPU-n1-0": CardUsage(5), "GPU-n1-1": CardUsage()}}}, ["GPU-n1-0"])
    for renewed in ("2023-11-14T22:13:18Z", "2023-11-14T22:13:21Z"):  # a Lease that was never renewed may be stale
        rig.scheduler.api.add_lease("n1", {USE: usage}, holderIdentity="n1", leaseDurationSeconds=9, renewTime=renewed)
        await rig.look()
    body = rig.get(f"{ROOT}/namespaces/default/podresources/web")
    assert body["spec"]["containers_device"][0]["device_info"][0]["use"] == {"memory": 5}
    table = rig.get(f"{ROOT}/namespaces/default/podresources/web", TABLE)
    assert "5Mi" in table["rows"][0]["cells"]
    await rig.look()
    assert await rig.version(f"{ROOT}/podresources") == before, (
        "usage changes all the time; it is shown, and causes no event"
    )


async def test_v0_2_has_its_own_names() -> None:
    rig = ProjectionRig()
    await rig.run("web")
    pod, info = rig.get(f"{OLD_ROOT}/namespaces/default/gpupods/default-web"), rig.get(f"{OLD_ROOT}/gpunodes/n1")
    assert pod["metadata"]["labels"]["nvidia-gpu-scheduler.node"] == "n1"
    assert (pod["kind"], pod["spec"]["node_name"]) == ("GpuPod", "n1")
    assert (info["kind"], info["spec"]["device_busy"]) == ("GpuNode", ["GPU-n1-0"])
    assert (info["status"]["node"], info["status"]["health"]) == ("n1", "False")
    assert info["status"]["message"] == "no gputile agent on the node"
    assert {"last_health_time", "last_transition_time"} <= set(info["status"])


async def test_pods_are_shown_from_grant_to_end() -> None:
    rig = ProjectionRig()
    await rig.run("web")
    assert await rig.names(f"{ROOT}/podresources") == ["web"]
    rig.scheduler.change("web", status={"phase": "Running"})
    await rig.look()
    assert rig.get(f"{ROOT}/namespaces/default/podresources/web")["status"]["phase"] == "Running"
    rig.scheduler.change("web", status={"phase": "Succeeded"})
    await rig.look()
    assert await rig.names(f"{ROOT}/podresources") == []
    assert rig.get(f"{ROOT}/gpuinfos/n1")["spec"]["device_busy"] == []


async def test_pods_and_nodes_without_cards_are_not_shown() -> None:
    rig = ProjectionRig(node("n1").cards(1), node("cpu-only"))
    rig.scheduler.arrive({"cpu": 1}, name="plain", on="n1")
    rig.scheduler.arrive({"gputile.io/gpu": 1}, name="pending")
    rig.projection.all_changed()
    await rig.look()
    assert await rig.names(f"{ROOT}/podresources") == []
    assert await rig.names(f"{ROOT}/gpuinfos") == ["n1"]


async def test_a_pod_of_the_same_name_is_another_pod() -> None:
    rig = ProjectionRig()
    await rig.run("web")
    watch = rig.watch(f"{ROOT}/podresources?resourceVersion={await rig.version(f'{ROOT}/podresources')}&watch=1")
    rig.scheduler.api.delete_pod("default/web")
    rig.scheduler.api.add_pod(held("web", uid="uid-later"))
    await rig.look()
    assert await watch.events(2) == [("DELETED", "web"), ("ADDED", "web")]
    assert rig.get(f"{ROOT}/namespaces/default/podresources/web")["metadata"]["uid"] == "uid-later"


async def test_a_deleted_node_and_an_unhealthy_card() -> None:
    rig = ProjectionRig()
    await rig.look()
    rig.scheduler.api.add_node(node("n2").cards(1, healthy=False, reason="XID 79").manifest())
    await rig.look()
    (card,) = rig.get(f"{ROOT}/gpuinfos/n2")["status"]["cards"]
    assert (card["healthy"], card["reason"]) == (False, "XID 79")
    rig.scheduler.api.delete_node("n2")
    await rig.look()
    assert await rig.names(f"{ROOT}/gpuinfos") == ["n1"]


async def test_the_agents_liveness_is_the_nodes_health() -> None:
    rig = ProjectionRig()
    rig.scheduler.api.add_lease("n1", holderIdentity="n1", leaseDurationSeconds=9, renewTime="2023-11-14T22:13:18.5Z")
    status = (await shown(rig, "gpuinfos/n1"))["status"]
    assert (status["node_health"], status["node_last_health_time"]) == ("True", "2023-11-14T22:13:18.5Z")
    rig.now += 60
    rig.scheduler.wait(10)
    rig.projection.touched(["n1"])
    status = (await shown(rig, "gpuinfos/n1"))["status"]
    assert status["node_health"] == "False"
    assert status["node_last_transition_time"].startswith("2023-11-14T22:14:20")
    rig.scheduler.api.add_lease("n1", renewTime="2023-11-14T22:14:30Z")
    assert (await shown(rig, "gpuinfos/n1"))["status"]["node_health"] == "True"


async def test_a_heartbeat_alone_is_shown_and_causes_no_event() -> None:
    rig = ProjectionRig()
    rig.scheduler.api.add_lease("n1", holderIdentity="n1", leaseDurationSeconds=9, renewTime="2023-11-14T22:13:18Z")
    await rig.look()
    before = await rig.version(f"{ROOT}/gpuinfos")
    rig.scheduler.api.add_lease("n1", renewTime="2023-11-14T22:13:21Z")
    status = (await shown(rig, "gpuinfos/n1"))["status"]
    assert status["node_last_health_time"] == "2023-11-14T22:13:21Z"
    assert await rig.version(f"{ROOT}/gpuinfos") == before


async def test_a_list_repairs_what_the_watch_missed() -> None:
    rig = ProjectionRig(pods=(held("stays"), held("goes", 4, 1)))
    await rig.look()
    del rig.scheduler.api.pods["default/goes"]
    rig.scheduler.relist()
    rig.projection.all_changed()
    await rig.look()
    assert await rig.names(f"{ROOT}/podresources") == ["stays"]


async def test_it_is_complete_after_the_first_refresh_that_began_when_nodes_and_pods_were_listed() -> None:
    rig = ProjectionRig(pods=(held("web"),))
    await rig.look()
    complete = [rig.projection.is_complete]  # the nodes are listed, the pods not yet
    rig.projection.all_changed(is_last=True)
    complete.append(rig.projection.is_complete)
    await rig.projection.refresh()
    complete.append(rig.projection.is_complete)
    rig.projection.all_changed()
    complete.append(rig.projection.is_complete)  # later changes arrive as events
    assert complete == [False, False, True, True]


async def test_a_refresh_that_began_before_the_pods_were_listed_does_not_make_it_complete() -> None:
    rig = ProjectionRig(*(node(f"n{number:03}").cards(1) for number in range(60)))
    looking = asyncio.create_task(rig.projection.refresh())
    await asyncio.sleep(0)
    assert not looking.done()
    rig.projection.all_changed(is_last=True)
    await looking
    complete = [rig.projection.is_complete]
    await rig.projection.refresh()
    assert [*complete, rig.projection.is_complete] == [False, True]


async def test_the_projection_refreshes_by_itself() -> None:
    rig = ProjectionRig()
    running = asyncio.create_task(rig.projection.run())
    async with asyncio.timeout(2):
        while not len(rig.projection.nodes):
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(
    ("model", "want"),
    [
        ("Tesla V100-SXM2-32GB", "BRAND_TESLA"),
        ("NVIDIA A100-SXM4-80GB", "BRAND_NVIDIA"),
        ("NVIDIA RTX A6000", "BRAND_NVIDIA_RTX"),
        ("NVIDIA GeForce RTX 4090", "BRAND_GEFORCE_RTX"),
        ("Quadro RTX 6000", "BRAND_QUADRO_RTX"),
        ("TITAN V", "BRAND_TITAN"),
        ("", "BRAND_UNKNOWN"),
    ],
)
def test_brands_are_derived_from_names(model: str, want: str) -> None:
    assert brand(model) == want
