"""An API server that responds from a script, one response per request, and records the requests.

async with Server(responds(201, {}), resets()) as server: ...
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, Self, TypeAlias

import msgspec
import orjson
from aiohttp import web

Answer: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RecordedRequest(msgspec.Struct, frozen=True):
    """A recorded request."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any

    @property
    def line(self) -> str:
        return f"{self.method} {self.path}"


class Server:
    """A server on 127.0.0.1 at a free port. A request beyond the script gets a 599."""

    def __init__(self, *script: Answer, tls: ssl.SSLContext | None = None) -> None:
        self._script, self._tls = list(script), tls
        self.requests: list[RecordedRequest] = []
        self.left = asyncio.Event()  # a client disconnected before the response was complete
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self._tls)
        await site.start()
        self.url = f"{'https' if self._tls else 'http'}://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        content = await request.read()
        body = orjson.loads(content) if content else None
        self.requests.append(RecordedRequest(request.method, request.raw_path.partition("?")[0], dict(request.query),
                                dict(request.headers), body))  # fmt: skip
        if not self._script:
            return web.Response(status=599, text="the script is over")
        try:
            return await self._script.pop(0)(request)
        except asyncio.CancelledError:
            self.left.set()
            raise


# ---- responses ------------------------------------------------------------------------------------------------------


def responds(status: int, body: object = None, **headers: str) -> Answer:
    """A whole response; `Retry_After="1"` becomes the header Retry-After."""

    async def answer(_: web.Request) -> web.StreamResponse:
        content = body if isinstance(body, bytes) else orjson.dumps(body)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(status=status, body=content, headers=named, content_type="application/json")

    return answer


def fails(code: int, reason: str = "", message: str = "", **headers: str) -> Answer:
    """A `Status` of a failure."""
    status = {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message}
    return responds(code, status, **headers)


def streams(*chunks: bytes, then: str = "end") -> Answer:
    """A watch that sends these chunks, then `end`, `reset` or `hang`."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
            await asyncio.sleep(0.001)  # so that the chunks arrive separately
        if then == "hang":
            await asyncio.sleep(30)
        if then == "reset":
            _abort(request)
        return response

    return answer


def resets(after: bytes = b"") -> Answer:
    """A reset of the connection, after some bytes of a longer response."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        if after:
            await response.prepare(request)
            await response.write(after)
            await asyncio.sleep(0.001)
        _abort(request)
        return response

    return answer


def hangs() -> Answer:
    """No response."""

    async def answer(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        return web.Response()

    return answer


def _abort(request: web.Request) -> None:
    assert request.transport is not None
    request.transport.abort()


# ---- bodies ---------------------------------------------------------------------------------------------------------


def pod(name: str, version: str = "1", **fields: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "ns", "uid": f"uid-{name}", "resourceVersion": version}, **fields}


def listing(*items: object, version: str = "10", more: str = "") -> dict[str, Any]:
    return {"kind": "PodList", "metadata": {"resourceVersion": version, "continue": more}, "items": items}


def line(kind: str, obj: object) -> bytes:
    return orjson.dumps({"type": kind, "object": obj}) + b"\n"
