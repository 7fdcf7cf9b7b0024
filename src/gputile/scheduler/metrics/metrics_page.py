"""The /metrics page: rendered once for all scrapes that arrive at about the same time.

It decides when a page is rendered again; what is on it comes from `ClusterMetrics` and the process's own metrics.
"""

import asyncio
import time
from collections.abc import Callable
from weakref import WeakValueDictionary

from gputile.http.messages import Response
from gputile.scheduler.metrics.cluster_metrics import ClusterMetrics
from gputile.telemetry.exposition import PAGE_TYPE
from gputile.telemetry.metrics import Metrics

SHARED = 2.0  # seconds for which a page that is still being sent is shared with other scrapes

Kind = tuple[bool, bool]  # whether it names pods; whether this replica is the leader


class MetricsPage:
    """Shares one rendered page between scrapes. The page of a large cluster has tens of megabytes: slow readers keep a
    single copy in memory. A page that was sent completely is dropped, so the next scrape always gets a new one."""

    def __init__(
        self,
        metrics: Metrics,
        cluster_metrics: ClusterMetrics,
        leads: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics, self._cluster_metrics, self._leads, self._clock = metrics, cluster_metrics, leads, clock
        self._being_sent: WeakValueDictionary[Kind, Response] = WeakValueDictionary()
        self._rendered_at: dict[Kind, float] = {}
        self._writing: dict[Kind, asyncio.Future[Response]] = {}

    async def response(self, *, names_pods: bool) -> Response:
        """The process's own metrics; on the leader also the cluster's, so that a sum over replicas is right."""
        kind = names_pods, self._leads()
        shared = self._being_sent.get(kind)
        if shared is not None and self._clock() - self._rendered_at[kind] < SHARED:
            return shared
        writing = self._writing.get(kind)
        if writing is None:
            writing = self._writing[kind] = asyncio.ensure_future(self._render(kind))
            writing.add_done_callback(lambda _: self._writing.pop(kind, None))
        return await asyncio.shield(writing)  # a cancelled scrape does not cancel it for the others

    async def _render(self, kind: Kind) -> Response:
        names_pods, leads = kind
        cluster = await self._cluster_metrics.text(names_pods=names_pods) if leads else b""
        page = Response(self._metrics.text() + cluster, content_type=PAGE_TYPE)
        self._being_sent[kind], self._rendered_at[kind] = page, self._clock()
        return page
