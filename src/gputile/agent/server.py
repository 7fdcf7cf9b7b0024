"""The agent's HTTP server: /healthz, /readyz and /metrics, over HTTP or HTTPS.

Any client in the cluster may connect, so the port is bounded: short headers, few connections, no bodies.
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
from gputile.telemetry.exposition import PAGE_TYPE
from gputile.telemetry.logs import fields

log = logging.getLogger(__name__)

PLAIN = "text/plain; charset=utf-8"
MAX_BODY = 0  # bytes; no body is read
BOUNDS = ListenerLimits(arriving=32, probing=8, strangers=24, known=0, answers=8 * MIB)  # 64 connections
PROBES = ("/healthz", "/readyz")
RENEW_INTERVAL = 60.0  # seconds between two checks of certificate and key


class AgentServer:
    """The server of the agent's three pages, with a certificate that is renewed from its files."""

    def __init__(self, settings: AgentSettings, page: Callable[[], bytes], why_not_ready: Callable[[], str]) -> None:
        """`page` returns the text of /metrics."""
        self._settings, self._page, self._why_not_ready = settings, page, why_not_ready
        self._listener = Listener(
            self._respond, MAX_BODY, probes=PROBES, trusts=lambda certificate: False, bounds=BOUNDS
        )
        self._renewing: asyncio.Task[None] | None = None
        self._loaded: tuple[object, ...] = ()  # stamps of the certificate files in use
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
        """Raises `InputError` when the files are no certificate and key, or do not match."""
        files = self._settings.tls
        if not files.certificate:
            return None
        stamps = self._stamps()
        context = from_files(files.certificate, files.key)
        self._loaded = stamps
        return context

    def _stamps(self) -> tuple[object, ...]:
        """What changes when the files do. The kubelet updates mounted Secrets by a new link; `stat` follows it."""
        try:
            stats = [os.stat(path) for path in (self._settings.tls.certificate, self._settings.tls.key)]
        except OSError as error:
            return (str(error),)
        return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_INTERVAL)
            self.renew_certificate()

    def renew_certificate(self) -> None:
        """Read certificate and key again if they have changed, for new connections. Half-written files are ignored."""
        if self._stamps() == self._loaded:
            return
        try:
            self._listener.renew(self._tls())
        except InputError as error:
            log.warning("cannot read the TLS certificate; the previous one stays", extra=fields(why=str(error)))

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _respond(self, request: Request) -> Response:
        match request.path:
            case "/healthz":
                return Response(b"ok\n", content_type=PLAIN)
            case "/readyz":
                why = self._why_not_ready()
                return Response(f"{why or 'ok'}\n".encode(), 503 if why else 200, content_type=PLAIN)
            case "/metrics":
                return Response(self._page(), content_type=PAGE_TYPE)
        return Response(b"not found; use /healthz, /readyz or /metrics\n", 404, content_type=PLAIN)
