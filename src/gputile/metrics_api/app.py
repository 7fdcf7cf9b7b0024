"""The aggregated metrics API, put together: what runs side by side while it is served.

Room:  the loops: following whom to believe, keeping the certificate, looking again at what changed.
Door:  `MetricsApi.run`, which ends only when cancelled; `window` is to be told what happens; `stop` before the end.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Protocol

from gputile.background.failure_isolation import FailureIsolation
from gputile.http.server import host_and_port
from gputile.kube.aggregation import FrontProxyConfigMap
from gputile.kube.api import Change, Json, Snapshot, Undecodable, WatchFailed, WatchUpdate
from gputile.metrics_api.authentication import FrontProxy
from gputile.metrics_api.authorization import Authorizer
from gputile.metrics_api.certificates import CertificateKeeper, CertificatePair, CertificateStore
from gputile.metrics_api.handlers import ResourceHandlers
from gputile.metrics_api.projection import ClusterView, Projection
from gputile.metrics_api.server import ApiServer, Verb
from gputile.metrics_api.settings import MetricsApiSettings
from gputile.metrics_api.watch_cache import MARK
from gputile.model.errors import InputError
from gputile.telemetry.logs import fields
from gputile.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

FILES = 60.0  # seconds between two looks at certificate files


class AggregatedApi(CertificateStore, Protocol):
    """What the API server does for us; `kube.aggregation` has it."""

    def follow_front_proxy(self) -> AsyncIterator[WatchUpdate[FrontProxyConfigMap]]: ...

    async def review(self, spec: Json) -> tuple[bool, str]: ...


class MetricsApi:
    """See the module's text."""

    def __init__(
        self,
        cluster: AggregatedApi,
        view: ClusterView,
        verb: Verb,
        *,
        settings: MetricsApiSettings,
        body_limit: int,
        metrics: Metrics,
        is_synced: Callable[[], bool],
        leads: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        isolation: FailureIsolation | None = None,
    ) -> None:
        self._isolation = isolation or FailureIsolation(metrics, clock)
        self._cluster, self._settings, self._pause = cluster, settings, pause
        self.window = Projection(view, self._settings.history, wall, secrets.randbits(MARK), self._isolation)
        authorizer = Authorizer(cluster.review, self._settings.authorization_ttl, clock)
        self.reader = ResourceHandlers(self.window, wall)
        self.server = ApiServer(
            self.reader, authorizer, verb, body_limit=body_limit, metrics=metrics, is_synced=is_synced
        )
        self._certifier = CertificateKeeper(
            cluster, self._settings, self.server.serve_as, leads=leads, wall=wall, pause=pause
        )

    async def run(self) -> None:
        keep_running = self._isolation.keep_running
        loops = (
            keep_running("metrics API", self.window.run, self._pause),
            keep_running("metrics API front proxy", self._follow_front_proxy, self._pause),
            keep_running("metrics API certificate", self._keep_certificate, self._pause),
            self.server.start(*host_and_port(self._settings.listen)),
        )
        tasks = [asyncio.create_task(loop) for loop in loops]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_certificate(self) -> None:
        await (self._read_files() if self._settings.certificate else self._certifier.run())

    async def stop(self) -> None:
        self.window.send_home()
        await self.server.stop()

    def drain(self) -> None:
        """Whoever asks or watches comes back, through the Service to the replica that leads now."""
        self.window.send_home()
        self.server.drain()

    async def _follow_front_proxy(self) -> None:
        async for seen in self._cluster.follow_front_proxy():
            match seen:
                case Snapshot(items):
                    self.believe(items[0] if items else FrontProxyConfigMap())
                case Change(how, found) if how != "DELETED":
                    self.believe(found)
                case WatchFailed(why) | Undecodable(_, why):
                    log.warning("whom to believe cannot be followed", extra=fields(why=why))

    def believe(self, found: FrontProxyConfigMap) -> None:
        """What cannot be used changes nothing: whom we believed we go on to believe."""
        try:
            self.server.believe(FrontProxy.read(found.data or {}))
        except InputError as wrong:
            log.warning("the metrics API cannot know who calls", extra=fields(why=str(wrong)))

    async def _read_files(self) -> None:
        certificate, key = Path(self._settings.certificate), Path(self._settings.key)
        while True:
            try:
                self.server.serve_as(CertificatePair(certificate.read_bytes(), key.read_bytes()))
            except (OSError, InputError) as wrong:  # half-written: the old ones still serve
                log.warning("the metrics API's certificate cannot be read", extra=fields(why=str(wrong)))
            await self._pause(FILES)
