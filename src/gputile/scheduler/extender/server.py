"""The HTTP server of the extender: the paths of every dialect on one listener. Decisions are made in other modules.

It owns the table of paths, TLS, and the limits on what an unknown client may send. Each verb has three steps: read,
decide, write.

A verb always answers 200: kube-scheduler never reads the body of another status, and the reason would be lost. A body
that cannot be used is answered with the reason in `Error`, and has no effect.
"""

import asyncio
import logging
import ssl
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol
from urllib.parse import unquote

import orjson

from gputile import __version__
from gputile.background.failure_isolation import FailureIsolation
from gputile.concurrency.time_slices import SearchLane, TimeSlices
from gputile.dialects import registry
from gputile.dialects.kube_objects import Pod
from gputile.http.messages import Certificate, Request, Response, names_in
from gputile.http.server import Listener
from gputile.http.tls import from_files
from gputile.scheduler import extender_api
from gputile.scheduler.binding.binder import NOT_LEADER, Binder
from gputile.scheduler.extender import legacy_status
from gputile.scheduler.extender.cpu_pods import CpuPodSteering
from gputile.scheduler.extender.filter import FilterService
from gputile.scheduler.extender_api import BadBody, BindArgs, FilterAnswer, FilterArgs, PreemptArgs
from gputile.scheduler.metrics.cluster_metrics import ClusterMetrics
from gputile.scheduler.metrics.metrics_page import MetricsPage
from gputile.scheduler.preemption.preemptor import Preemptor
from gputile.scheduler.settings import Settings, TlsSettings
from gputile.scheduler.state.cluster_state import ClusterState
from gputile.telemetry.logs import fields
from gputile.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

PLAIN = "text/plain; charset=utf-8"
LOOP = "verbs"  # in logs and metrics
INSPECT = "/gpushare-scheduler/inspect"
OPEN = frozenset({"/healthz", "/readyz", "/metrics", "/version"})
"""Paths that need no client certificate: they show no names of pods, unless `metrics.pods_to` is `anyone`."""
PROBES = ("/healthz", "/readyz")
NOT_KNOWN = "client certificate missing or not trusted; send one that the CA of `tls.client_ca` signed"
NOT_NAMED = "client certificate not authorized; none of its names is in `tls.client_names`"
NOT_SYNCED = "gputile has not seen the whole cluster yet; try again in a moment"

Verb = Callable[[bytes], bytes | Awaitable[bytes]]
Page = Callable[[], Response]

SAME = {"predicates": "filter", "priorities": "prioritize"}
"""Other names of verbs, as the last part of a path."""


class Readiness(Protocol):
    """What /readyz and the verbs ask the process: whether the cluster is listed, and why it is not ready."""

    def is_synced(self) -> bool: ...

    def why_not_ready(self) -> str: ...


class ExtenderServer:
    """The listener for kube-scheduler's verbs, the probes, /metrics and the status pages of older extenders."""

    def __init__(
        self,
        filter_service: FilterService,
        preemptor: Preemptor,
        steering: CpuPodSteering,
        binder: Binder,
        cluster_state: ClusterState,
        *,
        settings: Settings,
        metrics: Metrics,
        state: Readiness,
        leads: Callable[[], bool],
        isolation: FailureIsolation | None = None,
        lane: SearchLane | None = None,
    ) -> None:
        self._isolation, self._lane = isolation or FailureIsolation(metrics, time.monotonic), lane or SearchLane()
        self._filter_service, self._preemptor, self._steering = filter_service, preemptor, steering
        self._binder, self._cluster_state = binder, cluster_state
        self._settings, self._metrics, self._state, self._leads = settings, metrics, state, leads
        verbs: dict[str, Verb] = {
            "filter": self._filter,
            "prioritize": self._prioritize,
            "bind": self._bind,
            "preempt": self._preempt,
            "filter-dryrun": self._dry_run,
            "steer": self._steer,
        }
        self._verbs = {path: verbs[verb] for path, verb in routes().items()}
        self._pages: dict[str, Page] = {
            "/healthz": lambda: _text("ok"),
            "/readyz": self._ready,
            "/version": lambda: _text(__version__),
        }
        self._metrics_page = MetricsPage(metrics, ClusterMetrics(cluster_state, settings.metrics), leads)
        self._reports: dict[str, Callable[[], Awaitable[object]]] = {
            INSPECT: lambda: legacy_status.inspect(cluster_state.ledger, cluster_state.settings),
            "/scheduler/status": lambda: legacy_status.elastic_status(cluster_state.ledger),
            "/status": lambda: legacy_status.percent_status(cluster_state.ledger),
        }
        self._listener = Listener(
            self._handle,
            settings.body_limit * 2**20,
            lambda protocol: metrics.connections.labels(protocol).inc(),
            probes=PROBES,
            trusts=self._trusts if settings.tls.client_ca else None,
        )
        self.port = 0

    async def start(self) -> None:
        host, port = self._settings.host_and_port
        tls = tls_context(self._settings.tls)
        self.port = await self._listener.start(host, port, tls)
        log.info("listening", extra=fields(host=host, port=self.port, tls=tls is not None))

    async def stop(self) -> None:
        """Answer the requests in flight, then close."""
        await self._listener.stop()

    def drain(self) -> None:
        """Close all connections, so that clients reconnect through the Service to the leader."""
        self._listener.drain()

    def renew_certificate(self) -> None:
        """Reload certificate, key and CA for new connections. A mismatch raises and changes nothing."""
        self._listener.renew(tls_context(self._settings.tls))

    def _trusts(self, certificate: Certificate) -> bool:
        """Whether the certificate may call the verbs: the CA signed it, and it has one of the configured names."""
        names = self._settings.tls.client_names
        return bool(certificate) and (not names or not names_in(certificate).isdisjoint(names))

    # ---- one request ------------------------------------------------------------------------------------------------

    def _handle(self, request: Request) -> Response | Awaitable[Response]:
        path = request.path.rstrip("/") or "/"
        if path not in OPEN and not request.is_trusted:
            return _text(NOT_NAMED if request.is_known else NOT_KNOWN, 403)
        verb = self._verbs.get(path)
        if verb is not None and request.method == "POST":
            return self._answer(request, path, verb)
        if path.startswith(INSPECT + "/"):
            name = unquote(path[len(INSPECT) + 1 :])
            return self._report(legacy_status.inspect(self._cluster_state.ledger, self._cluster_state.settings, name))
        report = self._reports.get(path)
        if report is not None:  # POST too: nano registers `/status` for both
            return self._report(report())
        if path == "/metrics":
            to_all = not self._settings.tls.client_ca or self._settings.metrics.pods_to == "anyone"
            return self._metrics_page.response(names_pods=to_all or request.is_known)
        page = self._pages.get(path)
        if page is not None:
            return page()
        if verb is not None:
            return _text(f"{path} is an extender verb; use POST with the body that kube-scheduler sends", 405)
        return _text(f"{path} not found; see docs/scheduler.md for the paths", 404)

    def verb(self, request: Request) -> Response | Awaitable[Response] | None:
        """Answer a verb from another listener, which has authorized its caller; None if the path names no verb."""
        path = request.path.rstrip("/")
        verb = self._verbs.get(path)
        return self._answer(request, path, verb) if verb is not None else None

    def _answer(self, request: Request, path: str, verb: Verb) -> Response | Awaitable[Response]:
        """At once, except for bind, which waits for the API server, and for verbs that may take long. An internal error
        is answered like any other reason, and other requests are not affected."""
        answer = self._isolation.step(LOOP, path, partial(self._call, request, path, verb), expected=())
        if answer is None or isinstance(answer, bytes):
            return self._respond(answer or self._internal_error(path))
        return self._answer_later(answer, path)

    def _call(self, request: Request, path: str, verb: Verb) -> bytes | Awaitable[bytes]:
        try:
            if request.is_too_large:
                raise BadBody(f"the body is larger than {self._settings.body_limit} MiB; raise setting `body_limit`")
            return verb(request.body)
        except BadBody as error:
            return self._reject_body(path, error)

    async def _answer_later(self, answer: Awaitable[bytes], path: str) -> Response:
        body = await self._isolation.attempt(LOOP, path, lambda: answer, always=True, expected=())
        return self._respond(body or self._internal_error(path))

    def _internal_error(self, path: str) -> bytes:
        self._metrics.verbs.labels(_verb_of(path), "error").inc()
        return _error(_verb_of(path), "internal error of gputile; see the log of its scheduler")

    async def _report(self, document: Awaitable[object]) -> Response:
        return Response(orjson.dumps(await document))

    def _reject_body(self, path: str, error: BadBody) -> bytes:
        log.warning("malformed request", extra=fields(path=path, why=str(error)[:500]))
        self._metrics.verbs.labels(_verb_of(path), "malformed").inc()
        return _error(_verb_of(path), str(error))

    def _respond(self, answer: bytes) -> Response:
        """A replica that is not the leader closes all connections, so that kube-scheduler's next try reaches the
        leader. Closing only this one is too slow: kube-scheduler has several, and backs off longer after each error,
        so an error on each of them would take half a minute."""
        is_leader = self._leads()
        if not is_leader:
            asyncio.get_running_loop().call_soon(self.drain)  # after this response is written
        return Response(answer, close=not is_leader)

    # ---- the verbs --------------------------------------------------------------------------------------------------

    def _filter(self, body: bytes) -> bytes:
        return self._run_filter("filter", body, self._filter_service.filter)

    def _dry_run(self, body: bytes) -> Awaitable[bytes]:
        watch = Stopwatch(self._metrics, "filter-dryrun")
        args = self._read(body, every=self._cluster_state.ledger.fleet.names())
        watch.stage("read")
        return self._run_dry_run(args, watch)

    async def _run_dry_run(self, args: FilterArgs, watch: "Stopwatch") -> bytes:
        error = self._unavailable("filter-dryrun", args.pod)
        turns, slices = (
            self._filter_service.dry_run_in_turns(args),
            TimeSlices(time.monotonic, asyncio.sleep, self._lane),
        )
        answer = FilterAnswer(error=error) if error else await slices.run(turns)
        watch.stage("decide")
        return self._encode("filter-dryrun", args, answer)

    def _steer(self, body: bytes) -> bytes:
        """Always available: a replica that is not the leader, or is not synced, passes every pod unchanged."""
        watch = Stopwatch(self._metrics, "steer")
        args = self._read(body)
        watch.stage("read")
        answer = self._steering.filter(args)
        watch.stage("decide")
        self._metrics.verbs.labels("steer", "accepted" if answer.names is not args.names else "passed").inc()
        return extender_api.write_filter(answer, args)

    def _run_filter(self, verb: str, body: bytes, decide: Callable[[FilterArgs], FilterAnswer]) -> bytes:
        watch = Stopwatch(self._metrics, verb)
        args = self._read(body)
        watch.stage("read")
        error = self._unavailable(verb, args.pod)
        answer = FilterAnswer(error=error) if error else decide(args)
        watch.stage("decide")
        response = self._encode(verb, args, answer)
        watch.stage("write")
        return response

    def _encode(self, verb: str, args: FilterArgs, answer: FilterAnswer) -> bytes:
        self._metrics.verbs.labels(verb, "error" if answer.error else "accepted" if answer.names else "rejected").inc()
        _log_filter(verb, args, answer)
        return extender_api.write_filter(answer, args)

    def _prioritize(self, body: bytes) -> bytes:
        watch = Stopwatch(self._metrics, "prioritize")
        args = self._read(body)
        watch.stage("read")
        scores = self._filter_service.prioritize(args)
        watch.stage("decide")
        self._metrics.verbs.labels("prioritize", "accepted").inc()
        return extender_api.write_prioritize(scores)

    def _bind(self, body: bytes) -> Awaitable[bytes]:
        return self._run_bind(extender_api.read_bind(body))

    async def _run_bind(self, args: BindArgs) -> bytes:
        error = self._unavailable("bind") or await self._binder.bind(args)
        self._metrics.verbs.labels("bind", "error" if error else "accepted").inc()
        return extender_api.write_bind(error)

    def _preempt(self, body: bytes) -> Awaitable[bytes]:
        watch = Stopwatch(self._metrics, "preempt")
        args = extender_api.read_preempt(body)
        watch.stage("read")
        return self._run_preempt(args, watch)

    async def _run_preempt(self, args: PreemptArgs, watch: "Stopwatch") -> bytes:
        offers = {} if self._unavailable("preempt", args.pod) else await self._preemptor.answer_in_slices(args)
        watch.stage("decide")
        self._metrics.verbs.labels("preempt", "accepted" if offers else "rejected").inc()
        return extender_api.write_preempt(offers)

    def _read(self, body: bytes, every: list[str] | None = None) -> FilterArgs:
        """Decode the body. More candidate nodes than several times the size of the cluster are rejected as abuse."""
        args = extender_api.read_filter(body, every)
        known = len(self._cluster_state.ledger.fleet)
        if len(args.names) > 4 * known + 10_000:
            raise BadBody(f"{len(args.names)} nodes in the request, but the cluster has {known}; send only its nodes")
        return args

    def _unavailable(self, verb: str, pod: Pod | None = None) -> str:
        """Why this replica cannot answer the verb. Pods without GPUs always pass; a dry run only needs the ledger."""
        if pod is not None and self._filter_service.requests.of(pod) is None:
            return ""
        if not self._state.is_synced():
            return NOT_SYNCED
        return "" if verb == "filter-dryrun" or self._leads() else NOT_LEADER

    def _ready(self) -> Response:
        why = self._state.why_not_ready()
        return _text(why, 503) if why else _text("ok")


class Stopwatch:
    """Measures the stages of one verb, each when it ends."""

    def __init__(self, metrics: Metrics, verb: str) -> None:
        self._metrics, self._verb, self._last = metrics, verb, time.perf_counter()

    def stage(self, name: str) -> None:
        now = time.perf_counter()
        self._metrics.stage(self._verb, name).observe(now - self._last)
        self._last = now


def routes() -> dict[str, str]:
    """Every path, and the verb that it calls."""
    last_parts = {path: path.rpartition("/")[2] for path in registry.extender_paths()}
    return {path: SAME.get(verb, verb) for path, verb in last_parts.items()}


def tls_context(settings: TlsSettings) -> ssl.SSLContext | None:
    """None without a certificate. A client certificate is requested, and verified if it is sent."""
    if not settings.certificate:
        return None
    return from_files(settings.certificate, settings.key, settings.client_ca)


def _verb_of(path: str) -> str:
    return routes()[path]


def _error(verb: str, why: str) -> bytes:
    """The reason in the response format of the verb; those of prioritize and preempt have no field for an error."""
    match verb:
        case "bind":
            return extender_api.write_bind(why)
        case "prioritize":
            return extender_api.write_prioritize({})
        case "preempt":
            return extender_api.write_preempt({})
        case _:
            return extender_api.write_filter(FilterAnswer(error=why), None)


def _log_filter(verb: str, args: FilterArgs, answer: FilterAnswer) -> None:
    if log.isEnabledFor(logging.DEBUG) or answer.error:
        level = logging.WARNING if answer.error else logging.DEBUG
        refused = len(answer.failed) + len(answer.unresolvable)
        extra = fields(
            verb=verb, pod=args.pod.key, nodes=len(args.names), fit=answer.names, refused=refused, error=answer.error
        )
        log.log(level, "filtered", extra=extra)


def _text(text: str, status: int = 200) -> Response:
    return Response(text.encode(), status, PLAIN)
