"""The HTTPS server of the aggregated API: TLS, authentication, authorization, and routing to the handlers.

Every error response is a Kubernetes Status. How objects are read and written is not its concern.
"""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable

from gputile.http.messages import Certificate, Reply, Request, Response, Streamed, common_name
from gputile.http.server import Listener
from gputile.http.tls import present, server_context
from gputile.metrics_api import discovery
from gputile.metrics_api.authentication import AuthenticatedUser, FrontProxy
from gputile.metrics_api.authorization import Attributes, Authorizer
from gputile.metrics_api.certificates import CertificatePair
from gputile.metrics_api.handlers import ResourceHandlers
from gputile.metrics_api.request_info import ListOptions, read_list_options, read_request_info, with_selectors
from gputile.metrics_api.status import StatusError
from gputile.metrics_api.watch_limits import WatchLimits
from gputile.model.errors import InputError
from gputile.telemetry.logs import fields
from gputile.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

PROBES = frozenset({"/healthz", "/livez", "/readyz"})

Verb = Callable[[Request], Response | Awaitable[Response] | None]
"""Handles an extender verb; None if the path names none."""


class ApiServer:
    """Serves the metrics API to the API server's front proxy."""

    def __init__(
        self,
        handlers: ResourceHandlers,
        authorizer: Authorizer,
        verb: Verb,
        *,
        body_limit: int,
        metrics: Metrics,
        is_synced: Callable[[], bool],
    ) -> None:
        self._handlers, self._authorizer, self._verb = handlers, authorizer, verb
        self._metrics, self._is_synced = metrics, is_synced
        self._watches = WatchLimits()
        self._front: FrontProxy | None = None
        self._pair: CertificatePair | None = None
        self._complete = asyncio.Event()  # the certificate and the front proxy are known
        self._listener = Listener(
            self._handle,
            body_limit * 2**20,
            lambda protocol: metrics.connections.labels(protocol).inc(),
            setting="metrics_api.listen",
            probes=PROBES,
            trusts=self._trusts,
        )
        self.port = 0

    # ---- start and stop ---------------------------------------------------------------------------------------------

    def trust(self, front: FrontProxy) -> None:
        """Authenticate new connections by this front proxy."""
        self._renew(front, self._pair)

    def use_certificate(self, pair: CertificatePair) -> None:
        """Serve new connections with this certificate."""
        self._renew(self._front, pair)

    def _renew(self, front: FrontProxy | None, pair: CertificatePair | None) -> None:
        """An unusable certificate or CA raises `InputError` and changes nothing."""
        if front is not None and pair is not None:
            self._listener.renew(tls_context(front, pair))
            self._complete.set()
        self._front, self._pair = front, pair

    async def start(self, host: str, port: int) -> None:
        """Waits for the certificate and the front proxy, then listens."""
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
            return await self._route(request)
        except StatusError as error:
            self._metrics.api_requests.labels("", "", str(error.code)).inc()  # no label values from untrusted paths
            return error.response()
        except Exception:
            log.exception("a request to the metrics API failed", extra=fields(path=request.path[:200]))
            self._metrics.api_requests.labels("", "", "500").inc()
            message = "internal error of gputile on this request; see the log of its scheduler"
            return StatusError(500, "InternalError", message).response()

    async def _route(self, request: Request) -> Reply:
        """Discovery and OpenAPI contain no cluster data: every authenticated user may read them."""
        assert self._front is not None  # else there would be no connection
        user = self._front.user(request)
        if request.method == "GET":
            document = discovery.document(request.path.rstrip("/"), request.header("accept"))
            if document is not None:
                return document
        if request.method == "POST":
            return await self._call_verb(request, user)
        options = read_list_options(request)
        if options is None:
            raise StatusError(404, "NotFound", f"the server could not find the requested resource {request.path}")
        if request.method != "GET":
            message = f"{options.resource.plural}: read-only; use get, list or watch"
            raise StatusError(405, "MethodNotAllowed", message)
        await self._authorizer.check(user, _attributes(options))
        options = with_selectors(options)
        if not (self._is_synced() and self._handlers.is_complete):
            message = "gputile has not listed the whole cluster yet; try again in a moment"
            raise StatusError(503, "ServiceUnavailable", message, retryAfterSeconds=1)
        if options.verb == "watch":
            self._watches.check(user.name)
        self._metrics.api_requests.labels(options.resource.plural, options.verb, "200").inc()
        return await self._read(options, user)

    async def _read(self, options: ListOptions, user: AuthenticatedUser) -> Reply:
        match options.verb:
            case "get":
                return Response(self._handlers.get(options))
            case "list":
                return Response(await self._handlers.listed(options))
            case "watch":
                return Streamed(self._watches.counted(user.name, self._handlers.watch(options)))

    async def _call_verb(self, request: Request, user: AuthenticatedUser) -> Response:
        """kube-scheduler's calls through the API server, as the old configuration has it: POST .../schedule/filter."""
        info = read_request_info(request.path)
        if info is None or info.resource != "schedule":
            raise StatusError(405, "MethodNotAllowed", f"{request.path}: POST is not supported")
        attributes = Attributes("create", info.group, info.version, info.resource, info.namespace, info.name)
        await self._authorizer.check(user, attributes)
        answer = self._verb(request)
        if answer is None:
            message = f"{request.path}: no such extender verb; see docs/scheduler.md for the paths"
            raise StatusError(404, "NotFound", message)
        return answer if isinstance(answer, Response) else await answer


def _attributes(options: ListOptions) -> Attributes:
    resource = options.resource
    return Attributes(options.verb, resource.group, resource.version, resource.plural, options.namespace, options.only)


def tls_context(front: FrontProxy, pair: CertificatePair) -> ssl.SSLContext:
    """A client certificate is requested, and verified against the front proxy's CA when it is sent."""
    context = server_context()
    try:
        present(context, pair.certificate + pair.key)
        context.load_verify_locations(cadata=front.ca)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise InputError(
            f"TLS of the metrics API: cannot be set up ({error}); check the settings `metrics_api.*`"
        ) from error
    context.verify_mode = ssl.CERT_OPTIONAL
    return context
