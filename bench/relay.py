"""A relay to the API server that can make its client relist all pods.

    python -m bench.relay PORT UPSTREAM_PORT CERTIFICATE KEY CA
    SIGUSR1: end the watch of pods, and respond 410 to the next
    prints   `bound NAME SECONDS` for each binding: how long the API server took for it

Bytes pass unchanged, in a process of its own, so that neither the bench nor the measured process pays for it. A 410 is
the API server's response for an expired resource version: after it the client relists.
"""

import asyncio
import json
import signal
import ssl
import sys
import time
from contextlib import suppress

WATCH, BINDS = b"GET /api/v1/pods?", b"/binding"
BLOCK = 1 << 18
GONE = json.dumps(
    {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": 410, "message": "too old"}
).encode()
EXPIRED = (
    b"HTTP/1.1 410 Gone\r\nContent-Type: application/json\r\nContent-Length: " + str(len(GONE)).encode() + b"\r\n\r\n"
) + GONE


class Relay:
    """Forwards connections to one server, and knows which of them are watches of pods."""

    def __init__(self, upstream: int, ca: str) -> None:
        self._upstream, self._trust = upstream, ssl.create_default_context(cafile=ca)
        self._watches: set[asyncio.StreamWriter] = set()
        self._expire_next = False

    def expire(self) -> None:
        print(f"{len(self._watches)} watches of pods end", flush=True)
        self._expire_next = True
        for writer in self._watches:
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(
                "127.0.0.1", self._upstream, ssl=self._trust, server_hostname="127.0.0.1", limit=BLOCK
            )
        except OSError:
            writer.transport.abort()
            return
        binding = Binding()
        tasks = [
            asyncio.create_task(self._forward_requests(reader, upstream_writer, writer, binding)),
            asyncio.create_task(_forward_responses(upstream_reader, writer, binding)),
        ]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._watches.discard(writer)
        for end in (upstream_writer, writer):
            end.transport.abort()

    async def _forward_requests(
        self,
        reader: asyncio.StreamReader,
        upstream_writer: asyncio.StreamWriter,
        writer: asyncio.StreamWriter,
        binding: "Binding",
    ) -> None:
        with suppress(OSError):
            while block := await reader.read(BLOCK):
                if block.startswith(WATCH) and b"watch=" in block.partition(b"\r\n")[0]:
                    if self._expire_next:
                        self._expire_next = False
                        writer.write(EXPIRED)
                        continue
                    self._watches.add(writer)
                binding.request_sent(block)
                upstream_writer.write(block)
                await upstream_writer.drain()


class Binding:
    """The binding that is under way on one connection, if any: HTTP/1.1 has one request at a time."""

    def __init__(self) -> None:
        self._pod, self._at = "", 0.0

    def request_sent(self, block: bytes) -> None:
        if block.startswith(b"POST "):
            path = block.split(b" ", 2)[1].partition(b"?")[0]
            if path.endswith(BINDS):
                self._pod, self._at = path.split(b"/")[-2].decode(), time.monotonic()

    def response_received(self) -> None:
        if self._pod:
            print(f"bound {self._pod} {time.monotonic() - self._at:.6f}", flush=True)
            self._pod = ""


async def _forward_responses(source: asyncio.StreamReader, sink: asyncio.StreamWriter, binding: Binding) -> None:
    with suppress(OSError):
        while block := await source.read(BLOCK):
            binding.response_received()
            sink.write(block)
            await sink.drain()


async def main(port: int, upstream: int, certificate: str, key: str, ca: str) -> None:
    relay = Relay(upstream, ca)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, relay.expire)
    server = await asyncio.start_server(relay.serve, "127.0.0.1", port, ssl=tls, limit=BLOCK)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]))
