"""A TLS proxy to the API server that delays, loses, holds and invents responses.

One thread with an event loop. It terminates TLS with a certificate of the run, reads each request completely, and
applies the first matching rule: before the API server has seen the request, or after it was carried out.
"""

import asyncio
import random
import re
import ssl
import threading
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any, Literal, TypeVar

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout, DummyCookieJar, TCPConnector, web
from yarl import URL

from tests.e2e.control_plane import ControlPlane
from tests.e2e.processes import free_port

T = TypeVar("T")
HOP = {"host", "content-length", "transfer-encoding", "connection", "keep-alive"}
LISTS = {"/api/v1/pods": "pods", "/api/v1/nodes": "nodes"}
REASONS = {409: "Conflict", 429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable"}


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """A fault for some of the requests."""

    what: Literal["answer", "lose", "reset", "delay"]
    """answer: respond with `status`, and forward nothing. lose: forward the request, and respond with `status`. reset:
    forward it, and abort the connection. delay: forward it after `seconds`."""

    share: float = 1.0  # of the requests that match
    match: str = ""  # a regular expression, found in "METHOD /path"
    status: int = 500
    seconds: float = 0.0


class FaultProxy:
    """A proxy in front of the API server that applies rules.

    open --inject--> breaking some requests --heal--> open
    open --black_out--> dark: every connection is aborted --heal--> open
    """

    def __init__(self, plane: ControlPlane, name: str, seed: int = 0) -> None:
        self.name, self.port = name, free_port()
        self.injected: Counter[str] = Counter()
        self.requests = 0
        self.listed: dict[str, float] = {}  # by kind: time.monotonic() of the last whole list that went through
        self._plane, self._dice = plane, random.Random(seed)
        self._rules: tuple[Rule, ...] = ()
        self._dark = False
        self._held = re.compile("(?!)")
        self._held_binds = 0
        self._watches: dict[int, web.Request] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy {name}", daemon=True)

    @property
    def server(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def __enter__(self) -> "FaultProxy":
        self._thread.start()
        self._call(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self.heal()
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    # --- faults

    def inject(self, *rules: Rule) -> None:
        self._rules = rules

    def black_out(self) -> None:
        """Make the API server unreachable: connections are aborted without a response."""
        self._dark = True
        self.cut_watches()

    def heal(self) -> None:
        self._rules, self._dark = (), False
        self.release()

    def cut_watches(self) -> int:
        """Abort all watches; return their number."""
        return self._call(self._cut())

    def hold(self, match: str) -> None:
        """From now on hold matching requests until `release`, even if their client has disconnected."""
        self._held = re.compile(match)

    @property
    def held_binds(self) -> int:
        """The number of requests that are held now: the Bindings, in a storm."""
        return self._held_binds

    def release(self) -> None:
        self._held = re.compile("(?!)")
        self._loop.call_soon_threadsafe(self._open_gate)

    # --- in the loop

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    async def _start(self) -> None:
        self._gate = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        authority = self._plane.authority
        trust = ssl.create_default_context(cafile=authority.ca)
        self._session = ClientSession(
            connector=TCPConnector(limit=0, ssl=trust),
            cookie_jar=DummyCookieJar(),
            auto_decompress=False,
            timeout=ClientTimeout(total=None, sock_connect=5),
        )
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        pair = authority.server(f"proxy-{self.name}")
        tls.load_cert_chain(pair.cert, pair.key)
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=tls).start()

    async def _stop(self) -> None:
        await self._cut()
        await self._runner.cleanup()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()
        await asyncio.sleep(0.1)  # lets TLS connections end; else they are reported as unclosed

    async def _cut(self) -> int:
        watches = list(self._watches.values())
        for request in watches:
            _tear(request)
        return len(watches)

    def _open_gate(self) -> None:
        self._gate.set()
        self._gate = asyncio.Event()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        """Run outside the handler's task, so that a disconnecting client does not cancel its request."""
        body = await request.read()
        task = asyncio.ensure_future(self._answer(request, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _answer(self, request: web.Request, body: bytes) -> web.StreamResponse:
        self.requests += 1
        target = f"{request.method} {request.rel_url.raw_path}"
        rule = None if "watch" in request.query else self._pick(target)
        if self._dark:
            return _torn(request)
        if rule is not None and rule.what == "delay":
            await asyncio.sleep(rule.seconds)
        if rule is not None and rule.what == "answer":
            return _invented(rule.status)
        if self._held.search(target):
            self._held_binds += 1
            await self._gate.wait()
            self._held_binds -= 1
        try:
            response = await self._pass_on(request, body)
        except (ClientError, OSError, TimeoutError):
            return _torn(request)  # the API server is unreachable
        if (rule is not None and rule.what == "reset") or self._dark:
            return _torn(request)
        return _invented(rule.status) if rule is not None and rule.what == "lose" else response

    def _pick(self, target: str) -> Rule | None:
        for rule in self._rules:
            if re.search(rule.match, target) and self._dice.random() < rule.share:
                self.injected[f"{rule.what} {rule.status}" if rule.what in ("answer", "lose") else rule.what] += 1
                return rule
        return None

    async def _pass_on(self, request: web.Request, body: bytes) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP}
        url = URL(self._plane.server + request.rel_url.raw_path_qs, encoded=True)
        async with self._session.request(request.method, url, headers=headers, data=body) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP}
            if "watch" in request.query and answer.status == 200:
                return await self._stream(request, answer, kept)
            content = await answer.read()
            kind = LISTS.get(request.path)
            if kind and answer.status == 200 and b'"continue":"' not in content[:1000]:
                self.listed[kind] = time.monotonic()
            return web.Response(status=answer.status, body=content, headers=kept)

    async def _stream(self, request: web.Request, answer: Any, headers: dict[str, str]) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers=headers)
        self._watches[id(request)] = request
        try:
            await response.prepare(request)
            async for block in answer.content.iter_any():
                await response.write(block)
            await response.write_eof()
        finally:
            self._watches.pop(id(request), None)
        return response


def _tear(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def _torn(request: web.Request) -> web.Response:
    """Abort the connection; the returned response is not sent."""
    _tear(request)
    return web.Response(status=500)


def _invented(status: int) -> web.Response:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": "invented by the proxy of the chaos tests",
        "reason": REASONS.get(status, ""),
        "code": status,
    }
    headers = {"Retry-After": "1"} if status == 429 else {}
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json", headers=headers)
