"""The aggregated metrics API, put together: its loops, and the order in which they start and stop.

The loops watch the front proxy's CA, keep the serving certificate, and refresh changed objects. The scheduler reports
changes of the cluster to `MetricsApi.projection`.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Protocol

from gputile.background.failure_isolation import FailureIsolation
from gputile.concurrency.tasks import cancel_all
from gputile.http.server import host_and_port
from gputile.kube.aggregation import FrontProxyConfigMap
from gputile.kube.api import Json, WatchUpdate
from gputile.kube.informer import Informer, one_object
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

FILES = 60.0  # seconds between two checks of the certificate files


class AggregatedApi(CertificateStore, Protocol):
    """The API server calls that the metrics API needs; implemented in `kube.aggregation`."""

    def follow_front_proxy(self) -> AsyncIterator[WatchUpdate[FrontProxyConfigMap]]: ...

    async def review(self, spec: Json) -> tuple[bool, str]: ...


class MetricsApi:
    """The metrics API of one replica: projection, handlers, server and certificate."""

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
        self.projection = Projection(view, self._settings.history, wall, secrets.randbits(MARK), self._isolation)
        authorizer = Authorizer(cluster.review, self._settings.authorization_ttl, clock)
        self.handlers = ResourceHandlers(self.projection, wall)
        self.server = ApiServer(
            self.handlers, authorizer, verb, body_limit=body_limit, metrics=metrics, is_synced=is_synced
        )
        self._certificate_keeper = CertificateKeeper(
            cluster, self._settings, self.server.use_certificate, leads=leads, wall=wall, pause=pause
        )

    async def run(self) -> None:
        keep_running = self._isolation.keep_running
        loops = (
            keep_running("metrics API", self.projection.run, self._pause),
            keep_running("metrics API front proxy", self._watch_front_proxy, self._pause),
            keep_running("metrics API certificate", self._keep_certificate, self._pause),
            self.server.start(*host_and_port(self._settings.listen)),
        )
        tasks = [asyncio.create_task(loop) for loop in loops]
        try:
            await asyncio.gather(*tasks)
        finally:
            await cancel_all(tasks)

    async def _keep_certificate(self) -> None:
        await (self._read_files() if self._settings.certificate else self._certificate_keeper.run())

    async def stop(self) -> None:
        self.projection.close_watches()
        await self.server.stop()

    def drain(self) -> None:
        """Disconnect all clients and end all watches: they reconnect through the Service to the leader."""
        self.projection.close_watches()
        self.server.drain()

    async def _watch_front_proxy(self) -> None:
        feed, message = self._cluster.follow_front_proxy, "cannot watch the front-proxy CA"
        await Informer(feed, *one_object(self.trust), message=message, log_repeats=True).run()

    async def trust(self, config_map: FrontProxyConfigMap | None) -> None:
        """An unusable or missing ConfigMap changes nothing: the previous front proxy stays trusted."""
        data = config_map.data if config_map is not None else None
        try:
            self.server.trust(FrontProxy.read(data or {}))
        except InputError as error:
            log.warning("the metrics API cannot authenticate the front proxy", extra=fields(why=str(error)))

    async def _read_files(self) -> None:
        certificate, key = Path(self._settings.certificate), Path(self._settings.key)
        while True:
            try:
                self.server.use_certificate(CertificatePair(certificate.read_bytes(), key.read_bytes()))
            except (OSError, InputError) as error:  # half-written files: the old certificate stays in use
                log.warning("the metrics API's certificate cannot be read", extra=fields(why=str(error)))
            await self._pause(FILES)
