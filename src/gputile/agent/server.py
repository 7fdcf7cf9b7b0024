"""Health and numbers of the agent over HTTP: /healthz, /readyz, /metrics."""

import logging
from collections.abc import Callable

from gputile.agent.settings import AgentSettings
from gputile.telemetry.agent_metrics import AgentMetrics
from gputile.telemetry.figures import PAGE_TYPE
from gputile.telemetry.logs import fields
from gputile.web.messages import Request, Response
from gputile.web.server import Listener

log = logging.getLogger(__name__)

PLAIN = "text/plain; charset=utf-8"
LIMIT = 4096  # bytes of a body; nobody sends one


class Server:
    """See the module's text."""

    def __init__(self, settings: AgentSettings, metrics: AgentMetrics, why_not_ready: Callable[[], str]) -> None:
        self._settings, self._metrics, self._why_not_ready = settings, metrics, why_not_ready
        self._listener = Listener(self._answer, LIMIT)
        self.port = 0

    async def start(self) -> None:
        host, port = self._settings.host_and_port
        self.port = await self._listener.start(host, port, None)
        log.info("listening", extra=fields(host=host, port=self.port))

    async def stop(self) -> None:
        await self._listener.stop()

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
