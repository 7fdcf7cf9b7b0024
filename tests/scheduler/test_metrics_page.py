"""The /metrics page: shared while it is being sent, and new for the next scrape."""

import asyncio
from typing import Any

from gputile.scheduler.metrics.metrics_page import SHARED, MetricsPage
from gputile.telemetry.metrics import Metrics


class Cluster:
    """Stands for `ClusterMetrics`; it answers once the test opens the gate."""

    def __init__(self) -> None:
        self.made: list[bool] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def text(self, *, names_pods: bool) -> bytes:
        self.made.append(names_pods)
        await self.gate.wait()
        return b"page %d\n" % len(self.made)


class PageRig:
    def __init__(self) -> None:
        self.cluster, self.time, self.leads = Cluster(), 0.0, True
        cluster_metrics: Any = self.cluster
        self.page = MetricsPage(Metrics(), cluster_metrics, lambda: self.leads, lambda: self.time)


async def test_simultaneous_scrapes_get_the_same_bytes() -> None:
    rig = PageRig()
    rig.cluster.gate.clear()
    asking = [asyncio.ensure_future(rig.page.response(names_pods=True)) for _ in range(5)]
    await asyncio.sleep(0)
    asking[0].cancel()
    rig.cluster.gate.set()
    responses = await asyncio.gather(*asking[1:])
    assert len({id(response.body) for response in responses}) == 1
    assert rig.cluster.made == [True]


async def test_a_page_that_is_still_being_sent_is_shared_for_a_moment() -> None:
    rig = PageRig()
    slow = await rig.page.response(names_pods=True)
    rig.time = SHARED - 0.1
    assert (await rig.page.response(names_pods=True)) is slow
    rig.time = SHARED + 0.1
    assert (await rig.page.response(names_pods=True)) is not slow


async def test_a_page_that_was_sent_completely_is_rendered_again() -> None:
    rig = PageRig()
    await rig.page.response(names_pods=True)
    await asyncio.sleep(0)  # until then the event loop still has a reference
    assert (await rig.page.response(names_pods=True)).body.endswith(b"page 2\n")


async def test_clients_with_and_without_the_right_to_pods_never_share() -> None:
    rig = PageRig()
    certified = await rig.page.response(names_pods=True)
    anonymous = await rig.page.response(names_pods=False)
    assert certified.body is not anonymous.body
    assert rig.cluster.made == [True, False]


async def test_a_page_of_the_leader_is_not_served_after_losing_leadership() -> None:
    rig = PageRig()
    led = await rig.page.response(names_pods=True)
    rig.leads = False
    assert b"page" in led.body
    assert b"page" not in (await rig.page.response(names_pods=True)).body
