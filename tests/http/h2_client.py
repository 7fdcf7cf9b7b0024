"""A client of HTTP/2 over TLS, from another implementation (PyPI `h2`)."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import h2.config
import h2.connection
import h2.events
import h2.settings

Settings = dict[h2.settings.SettingCodes, int]


class Eager(h2.connection.H2Connection):
    """Opens more concurrent streams than the server allows, as clients may before they have read its SETTINGS."""

    @property
    def open_outbound_streams(self) -> int:
        return 0


class Client:
    """A client with many concurrent requests on one connection; `bodies` has the complete responses."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, settings: Settings) -> None:
        self._reader, self._writer = reader, writer
        self._h2 = Eager(h2.config.H2Configuration(client_side=True, header_encoding=None))
        self._h2.initiate_connection()
        if settings:
            self._h2.update_settings({int(name): value for name, value in settings.items()})
        self._parts: dict[int, bytes] = {}
        self.bodies: dict[int, bytes] = {}
        self.statuses: dict[int, bytes] = {}
        self.pings = 0
        self.resets: dict[int, int] = {}
        self.goaway: h2.events.ConnectionTerminated | None = None

    async def post(self, path: str, body: bytes) -> int:
        """Send a request; return its stream identifier."""
        number = self._h2.get_next_available_stream_id()
        fields = [(":method", "POST"), (":scheme", "https"), (":path", path), (":authority", "x")]
        self._h2.send_headers(number, [*fields, ("content-length", str(len(body)))])
        while body:
            size = min(len(body), self._h2.local_flow_control_window(number), self._h2.max_outbound_frame_size)
            if not size:
                await self.listen()
                continue
            piece, body = body[:size], body[size:]
            self._h2.send_data(number, piece, end_stream=not body)
        await self.flush()
        return number

    async def get(self, path: str, headers: list[tuple[str, str]]) -> int:
        """Send a request; return its stream identifier. `received` returns the body received so far."""
        number = self._h2.get_next_available_stream_id()
        fields = [(":method", "GET"), (":scheme", "https"), (":path", path), (":authority", "x"), *headers]
        self._h2.send_headers(number, fields, end_stream=True)
        await self.flush()
        return number

    def received(self, number: int) -> bytes:
        return self.bodies.get(number) or self._parts.get(number, b"")

    async def ping(self) -> None:
        """Send a PING and read once."""
        self.pings += 1
        self._h2.ping(b"01234567")
        await self.flush()
        await self.listen()

    def widen(self, increment: int) -> None:
        self._h2.increment_flow_control_window(increment)

    async def reset(self, number: int) -> None:
        self._h2.reset_stream(number)
        await self.flush()

    async def ask(self, path: str, body: bytes) -> bytes:
        number = await self.post(path, body)
        await self.until(number)
        return self.bodies[number]

    async def until(self, *numbers: int) -> None:
        while not set(numbers) <= self.bodies.keys() | self.resets.keys():
            await self.listen()

    async def until_goaway(self) -> None:
        while self.goaway is None:
            await self.listen()

    async def flush(self) -> None:
        if data := self._h2.data_to_send():
            self._writer.write(data)
            await self._writer.drain()

    async def listen(self) -> None:
        data = await self._reader.read(65536)
        if not data:
            raise ConnectionError("the server closed the connection")
        for event in self._h2.receive_data(data):
            self._handle(event)
        await self.flush()

    def _handle(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.ResponseReceived():
                self.statuses[event.stream_id] = dict(event.headers)[b":status"]
            case h2.events.DataReceived():
                self._parts[event.stream_id] = self._parts.get(event.stream_id, b"") + event.data
                self._h2.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id)
            case h2.events.StreamEnded():
                self.bodies[event.stream_id] = self._parts.pop(event.stream_id, b"")
            case h2.events.StreamReset():
                self.resets[event.stream_id] = int(event.error_code)
            case h2.events.ConnectionTerminated():
                self.goaway = event


def trusting(pem: bytes, *protocols: str) -> ssl.SSLContext:
    """A client's context that trusts this CA, and offers these protocols in ALPN."""
    context = ssl.create_default_context(cadata=pem.decode())
    context.check_hostname = False
    if protocols:
        context.set_alpn_protocols(protocols)
    return context


@asynccontextmanager
async def connected(
    port: int, context: ssl.SSLContext, settings: Settings | None = None, *, name: str | None = "localhost"
) -> AsyncIterator[Client]:
    """`name`: for SNI; None sends the address, without SNI."""
    host = "127.0.0.1"
    reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=name or host)
    try:
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
        client = Client(reader, writer, settings or {})
        await client.flush()
        yield client
    finally:
        writer.close()
