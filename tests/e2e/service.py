"""A Kubernetes Service as a TCP proxy: new connections go to the pod that carries the leader's label.

One thread with an event loop, and a watch of the pods. As with kube-proxy, an existing connection stays with its pod
when the label moves, and without a selected pod a connection is refused (here: reset).
"""

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from tests.e2e.api import Kube
from tests.e2e.processes import free_port
from tests.e2e.watching import watch

T = TypeVar("T")
Address = tuple[str, int]
LEADER = "gputile.io/leader=true"
RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: close with a reset


class Service:
    """The TCP proxy of a Service.

    open --cut--> cut: connections are reset, new ones too --restore--> open
    open --pause--> paused: bytes wait, new connections are accepted --resume--> open
    """

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        backends: Mapping[str, Address],
        selector: str = LEADER,
        port: int = 0,
        is_ready: Callable[[str], bool] = lambda pod: True,
    ) -> None:
        """`is_ready`: the result of the pod's readiness probe; there is no kubelet that would run it."""
        self._is_ready = is_ready
        self.backends, self.port = dict(backends), port or free_port()
        self.delay = 0.0  # seconds that every block of bytes is kept back, in both directions
        self._namespace = namespace
        self._pods = watch(kube, "Pod", namespace, labels=selector)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="service", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self._flow = asyncio.Event()
        self._cut = False

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> "Service":
        self._pods.__enter__()
        self._thread.start()
        self._server = self._call(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
        self._pods.close()

    def chosen(self) -> str | None:
        """The pod that a new connection would reach: it carries the label, is ready, not terminating, and has a
        backend."""
        pods = (pod["metadata"] for pod in self._pods.objects.values())
        names = (p["name"] for p in pods if "deletionTimestamp" not in p and p["name"] in self.backends)
        return next((name for name in names if self._is_ready(name)), None)

    @property
    def connections(self) -> int:
        return len(self._tasks)

    def cut(self) -> None:
        """Reset every connection, and each new one, until `restore`."""
        self._call(self._sever(stay=True))

    def drop(self) -> None:
        """Reset every connection once; new ones are served."""
        self._call(self._sever(stay=False))

    def restore(self) -> None:
        self._cut = False

    def pause(self) -> None:
        """Connections stay open and nothing passes, until `resume`."""
        self._loop.call_soon_threadsafe(self._flow.clear)

    def resume(self) -> None:
        self._loop.call_soon_threadsafe(self._flow.set)

    # --- in the loop

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> asyncio.Server:
        self._flow.set()
        return await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    async def _shut(self) -> None:
        self._server.close()
        await self._sever(stay=True)

    async def _sever(self, stay: bool) -> None:
        self._cut = stay
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward = None
        try:
            name = None if self._cut else self.chosen()
            if name is None:
                raise ConnectionRefusedError("no pod is selected")
            from_pod, onward = await asyncio.open_connection(*self.backends[name])
            await _both(self._pump(reader, onward), self._pump(from_pod, writer))
            onward.close()
            writer.close()
            return
        except OSError:
            pass  # the pod is unreachable: the client gets a reset, as from a Service
        except asyncio.CancelledError:
            pass  # cut or closed: reset both connections below
        _reset(writer)
        if onward is not None:
            _reset(onward)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while block := await source.read(1 << 16):
            if self.delay:
                await asyncio.sleep(self.delay)
            await self._flow.wait()
            sink.write(block)
            await sink.drain()
        with suppress(OSError):
            sink.write_eof()


async def _both(there: Coroutine[Any, Any, None], back: Coroutine[Any, Any, None]) -> None:
    """Both directions: after the client's EOF the response may still follow; after the pod's EOF the connection
    ends."""
    sending, answering = asyncio.ensure_future(there), asyncio.ensure_future(back)
    try:
        await asyncio.wait({sending, answering}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            sending.result()  # raises if the client was disconnected
        await answering
    finally:
        for task in (sending, answering):
            task.cancel()
        await asyncio.gather(sending, answering, return_exceptions=True)


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()
