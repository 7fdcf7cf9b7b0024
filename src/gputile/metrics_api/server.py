"""The listener of the aggregated API: who asks, may they, and what is the answer.

Room:  paths to answers, TLS, and nothing of how an answer is made. Every no is a Kubernetes Status.
Door:  `ApiServer.start`, `stop`; `believe` and `serve_as` change whom we believe and who we are, for new connections.
"""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable

from gputile.http.messages import Certificate, Reply, Request, Response, Streamed, common_name
from gputile.http.server import ALPN, Listener
from gputile.http.tls import present, server_context
from gputile.metrics_api import discovery
from gputile.metrics_api.authentication import AuthenticatedUser, FrontProxy
from gputile.metrics_api.authorization import Attributes, Authorizer
from gputile.metrics_api.certificates import CertificatePair
from gputile.metrics_api.handlers import ResourceHandlers
from gputile.metrics_api.request_info import ListOptions, read_list_options, read_request_info, selected
from gputile.metrics_api.status import StatusError
from gputile.metrics_api.watch_limits import WatchLimits
from gputile.model.errors import InputError
from gputile.telemetry.logs import fields
from gputile.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

PROBES = frozenset({"/healthz", "/livez", "/readyz"})

Verb = Callable[[Request], Response | Awaitable[Response] | None]
"""Answers an extender verb; None where the path names none."""


class ApiServer:
    """See the module's text."""

    def __init__(
        self,
        reader: ResourceHandlers,
        authorizer: Authorizer,
        verb: Verb,
        *,
        body_limit: int,
        metrics: Metrics,
        is_synced: Callable[[], bool],
    ) -> None:
        self._reader, self._authorizer, self._verb = reader, authorizer, verb
        self._metrics, self._is_synced = metrics, is_synced
        self._watches = WatchLimits()
        self._front: FrontProxy | None = None
        self._pair: CertificatePair | None = None
        self._complete = asyncio.Event()  # we know who we are, and whom to believe
        self._listener = Listener(
            self._handle,
            body_limit * 2**20,
            lambda protocol: metrics.connections.labels(protocol).inc(),
            setting="metrics_api.listen",
            probes=PROBES,
            trusts=self._trusts,
        )
        self.port = 0

    # ---- life -------------------------------------------------------------------------------------------------------

    def believe(self, front: FrontProxy) -> None:
        self._renew(front, self._pair)

    def serve_as(self, pair: CertificatePair) -> None:
        self._renew(self._front, pair)

    def _renew(self, front: FrontProxy | None, pair: CertificatePair | None) -> None:
        """What cannot be used raises, and changes nothing."""
        if front is not None and pair is not None:
            self._listener.renew(tls_context(front, pair))
            self._complete.set()
        self._front, self._pair = front, pair

    async def start(self, host: str, port: int) -> None:
        """When we know who we are and whom to believe."""
        await self._complete.wait()
        assert self._front is not None
        assert self._pair is not None
        self.port = await self._listener.start(host, port, tls_context(self._front, self._pair))
        log.info("the metrics API is listening", extra=fields(host=host, port=self.port))

    async def stop(self) -> None:
        await self._listener.stop()

    def drain(self) -> None:
        self._listener.drain()

    def _trusts(self, certificate: Certificate) -> bool:
        return self._front is not None and bool(certificate) and self._front.is_named(common_name(certificate))

    # ---- one request ------------------------------------------------------------------------------------------------

    def _handle(self, request: Request) -> Reply | Awaitable[Reply]:
        if request.path in PROBES:
            return Response(b"ok", content_type="text/plain; charset=utf-8")
        return self._answer(request)

    async def _answer(self, request: Request) -> Reply:
        try:
            return await self._answered(request)
        except StatusError as no:
            self._metrics.api_requests.labels("", "", str(no.code)).inc()  # nothing that a stranger could make up
            return no.response()
        except Exception:
            log.exception("a request to the metrics API failed", extra=fields(path=request.path[:200]))
            self._metrics.api_requests.labels("", "", "500").inc()
            return StatusError(500, "InternalError", "gputile failed on this request; its log says where").response()

    async def _answered(self, request: Request) -> Reply:
        """Discovery and descriptions say nothing about anybody: whoever came through the API server may read them."""
        assert self._front is not None  # or nobody could have connected
        user = self._front.user(request)
        if request.method == "GET":
            found = discovery.document(request.path.rstrip("/"), request.header("accept"))
            if found is not None:
                return found
        if request.method == "POST":
            return await self._asked_verb(request, user)
        ask = read_list_options(request)
        if ask is None:
            raise StatusError(404, "NotFound", f"the server could not find the requested resource {request.path}")
        if request.method != "GET":
            message = f"{ask.resource.plural} can be read, listed and watched; they change with the pods and nodes"
            raise StatusError(405, "MethodNotAllowed", message)
        found_at = ask.resource
        wanted = Attributes(ask.verb, found_at.group, found_at.version, found_at.plural, ask.namespace, ask.only)
        await self._authorizer.check(user, wanted)
        ask = selected(ask)
        if not (self._is_synced() and self._reader.is_whole):
            message = "gputile has not seen the whole cluster yet; try again in a moment"
            raise StatusError(503, "ServiceUnavailable", message, retryAfterSeconds=1)
        if ask.verb == "watch":
            self._watches.check(user.name)
        self._metrics.api_requests.labels(found_at.plural, ask.verb, "200").inc()
        return await self._read(ask, user)

    async def _read(self, ask: ListOptions, user: AuthenticatedUser) -> Reply:
        match ask.verb:
            case "get":
                return Response(self._reader.get(ask))
            case "list":
                return Response(await self._reader.listed(ask))
            case "watch":
                return Streamed(self._watches.counted(user.name, self._reader.watch(ask)))

    async def _asked_verb(self, request: Request, user: AuthenticatedUser) -> Response:
        """kube-scheduler through the API server, as the old configuration has it: POST .../schedule/filter."""
        place = read_request_info(request.path)
        if place is None or place.resource != "schedule":
            raise StatusError(405, "MethodNotAllowed", f"{request.path} takes no POST")
        wanted = Attributes("create", place.group, place.version, place.resource, place.namespace, place.name)
        await self._authorizer.check(user, wanted)
        answer = self._verb(request)
        if answer is None:
            raise StatusError(
                404, "NotFound", f"there is no verb at {request.path}; see docs/scheduler.md for the paths"
            )
        return answer if isinstance(answer, Response) else await answer


def tls_context(front: FrontProxy, pair: CertificatePair) -> ssl.SSLContext:
    """A client's certificate is asked for, and checked against the front proxy's CA when it is sent."""
    context = server_context(ALPN)
    try:
        present(context, pair.certificate + pair.key)
        context.load_verify_locations(cadata=front.ca)
    except (OSError, ValueError) as wrong:  # ssl.SSLError is an OSError
        raise InputError(f"TLS of the metrics API cannot be set up: {wrong}; see `metrics_api.*`") from wrong
    context.verify_mode = ssl.CERT_OPTIONAL
    return context
