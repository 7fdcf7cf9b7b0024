"""The page of /metrics, made once for all who ask for it at about the same time.

Room:  when a page is made anew, and when one that is being sent to somebody is sent to others too.
Door:  `MetricsPage.response`.
"""

import asyncio
import time
from collections.abc import Callable
from weakref import WeakValueDictionary

from gputile.http.messages import Response
from gputile.scheduler.metrics.cluster_metrics import ClusterMetrics
from gputile.telemetry.exposition import PAGE_TYPE
from gputile.telemetry.metrics import Metrics

SHARED = 2.0  # seconds for which a page that somebody is still being sent is given to others

Kind = tuple[bool, bool]  # it names pods; we lead


class MetricsPage:
    """The page of a large cluster is tens of megabytes: those who ask share one, and whoever does not fetch it keeps it
    in memory once. A page that all have fetched is forgotten, so the next scrape always gets a new one."""

    def __init__(
        self,
        metrics: Metrics,
        figures: ClusterMetrics,
        leads: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics, self._figures, self._leads, self._clock = metrics, figures, leads, clock
        self._being_sent: WeakValueDictionary[Kind, Response] = WeakValueDictionary()
        self._made_at: dict[Kind, float] = {}
        self._writing: dict[Kind, asyncio.Future[Response]] = {}

    async def response(self, *, names_pods: bool) -> Response:
        """Our own metrics; and those of the cluster from the leader only, so that nobody adds them up twice."""
        kind = names_pods, self._leads()
        shared = self._being_sent.get(kind)
        if shared is not None and self._clock() - self._made_at[kind] < SHARED:
            return shared
        writing = self._writing.get(kind)
        if writing is None:
            writing = self._writing[kind] = asyncio.ensure_future(self._written(kind))
            writing.add_done_callback(lambda _: self._writing.pop(kind, None))
        return await asyncio.shield(writing)  # one who gives up does not take it from the others

    async def _written(self, kind: Kind) -> Response:
        names_pods, leads = kind
        cluster = await self._figures.text(names_pods=names_pods) if leads else b""
        page = Response(self._metrics.text() + cluster, content_type=PAGE_TYPE)
        self._being_sent[kind], self._made_at[kind] = page, self._clock()
        return page
