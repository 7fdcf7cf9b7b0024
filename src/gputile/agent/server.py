"""Health and numbers of the agent over HTTP or HTTPS: /healthz, /readyz, /metrics.

Room:  three pages, and the bounds of the port: short heads, few connections, no bodies. Anybody in the cluster may ask.
Door:  `AgentServer.start`, `AgentServer.stop`.
"""

import asyncio
import logging
import os
import ssl
from collections.abc import Callable

from gputile.agent.settings import AgentSettings
from gputile.http.limits import MIB
from gputile.http.messages import Request, Response
from gputile.http.server import Listener, ListenerLimits
from gputile.http.tls import from_files
from gputile.model.errors import InputError
from gputile.telemetry.agent_metrics import AgentMetrics
from gputile.telemetry.exposition import PAGE_TYPE
from gputile.telemetry.logs import fields

log = logging.getLogger(__name__)

PLAIN = "text/plain; charset=utf-8"
LIMIT = 0  # bytes of a body; none is read
BOUNDS = ListenerLimits(arriving=32, probing=8, strangers=24, known=0, answers=8 * MIB)  # 64 connections
PROBES = ("/healthz", "/readyz")
FILES = 60.0  # seconds between two looks at certificate and key
PROTOCOLS = ("http/1.1",)


class AgentServer:
    """See the module's text."""

    def __init__(self, settings: AgentSettings, metrics: AgentMetrics, why_not_ready: Callable[[], str]) -> None:
        self._settings, self._metrics, self._why_not_ready = settings, metrics, why_not_ready
        self._listener = Listener(self._answer, LIMIT, probes=PROBES, trusts=lambda certificate: False, bounds=BOUNDS)
        self._renewing: asyncio.Task[None] | None = None
        self._seen: tuple[object, ...] = ()  # the files that we serve with
        self.port = 0

    async def start(self) -> None:
        host, port = self._settings.host_and_port
        tls = self._tls()
        self.port = await self._listener.start(host, port, tls)
        if tls is not None:
            self._renewing = asyncio.create_task(self._renew())
        log.info("listening", extra=fields(host=host, port=self.port, tls=tls is not None))

    async def stop(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        await self._listener.stop()

    # ---- TLS --------------------------------------------------------------------------------------------------------

    def _tls(self) -> ssl.SSLContext | None:
        """`InputError` where the files are no certificate and key, or not of one another."""
        files = self._settings.tls
        if not files.certificate:
            return None
        seen = self._stamps()
        context = from_files(files.certificate, files.key, protocols=PROTOCOLS)
        self._seen = seen
        return context

    def _stamps(self) -> tuple[object, ...]:
        """What changes when the files do. The kubelet replaces mounted Secrets by a new link: these are of its end."""
        try:
            found = [os.stat(name) for name in (self._settings.tls.certificate, self._settings.tls.key)]
        except OSError as wrong:
            return (str(wrong),)
        return tuple((one.st_mtime_ns, one.st_size, one.st_ino) for one in found)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(FILES)
            self.renew_certificate()

    def renew_certificate(self) -> None:
        """Read certificate and key again if they have changed, for new connections. Half-written ones do nothing."""
        if self._stamps() == self._seen:
            return
        try:
            self._listener.renew(self._tls())
        except InputError as wrong:
            log.warning("the certificate cannot be read", extra=fields(why=str(wrong)))

    # ---- one request ------------------------------------------------------------------------------------------------

    def _answer(self, request: Request) -> Response:
        match request.path:
            case "/healthz":
                return Response(b"ok\n", content_type=PLAIN)
            case "/readyz":
                why = self._why_not_ready()
                return Response(f"{why or 'ok'}\n".encode(), 503 if why else 200, content_type=PLAIN)
            case "/metrics":
                return Response(self._metrics.text(), content_type=PAGE_TYPE)
        return Response(b"there are /healthz, /readyz and /metrics\n", 404, content_type=PLAIN)
