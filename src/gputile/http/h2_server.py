"""The server side of one HTTP/2 connection over TLS (RFC 9113): concurrent requests on one connection.

It parses frames, passes requests to the server, and sends the responses. It must not know the content of requests.

kube-scheduler keeps two idle HTTP/1.1 connections and opens a new one for every further concurrent bind; each handshake
costs both sides more than the call. HTTP/2 connections are all kept.

Any host in the network can connect, so everything that an untrusted client can make the server keep or do is limited:
open streams and work for streams that were reset (`MOST_STREAMS`), incomplete bodies (`MOST_BODIES`), unread responses
(`MOST_WAITING`), headers, control frames (`MOST_NOISE`), settings (`MOST_SETTINGS`), time. `limits` bounds all
connections of a class together. A caller without a trusted certificate has one stream at a time, and its bodies are not
read: it is answered from its headers.
"""

import asyncio
from collections.abc import Awaitable
from contextlib import aclosing
from typing import cast

import msgspec

from gputile.http import h2_frames
from gputile.http.h1_body import Malformed
from gputile.http.h2_frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    LARGEST,
    PADDED,
    WITH_PRIORITY,
    H2ConnectionError,
    H2ErrorCode,
    H2StreamError,
)
from gputile.http.h2_sender import H2Sender
from gputile.http.h2_streams import H2Stream, answer_fields, check_plain, read_fields, stream_fields
from gputile.http.hpack import NO_TABLE, Field, HpackDecoder
from gputile.http.limits import CallerClass
from gputile.http.messages import (
    LONGEST_HEAD,
    SHORT_HEAD,
    SLOW,
    Reply,
    Request,
    Response,
    ServerHooks,
    Streamed,
    common_name,
    internal_error,
    peer,
    respond,
)

ASKED_STREAMS = 1
"""SETTINGS_MAX_CONCURRENT_STREAMS: a client opens one connection per concurrent request, and keeps them all. Go counts
a call that timed out as a stream until the connection responds again. So a client whose replica hangs, or disappeared
with its node, loses one call per connection and then reconnects, as with HTTP/1.1; with more streams it would use the
dead connection until its own pings fail: for 45 seconds in kube-scheduler."""

MOST_STREAMS = 250  # streams that are tolerated: a client may open some before it has read our SETTINGS
MOST_SETTINGS = 32  # entries of a frame; the RFC defines six
MOST_BODIES = 4  # times the limit of one body, for all incomplete bodies
MOST_WAITING = 16 * 2**20  # bytes of unread responses; further streams are refused until the client reads
MOST_NOISE = 1000  # control frames between two sweeps, beyond those that responses account for
ACCOUNTED = 512  # bytes of a response that account for one such frame: Go sends WINDOW_UPDATE every 4 KiB
MOST_CREDIT = 100_000  # frames
STRANGE_NOISE = 2  # counted for a request of an untrusted caller
RESET_NOISE = 2  # counted for a stream that is reset: its work was for nothing
HIGH_WATER = 65536  # bytes in the transport's write buffer before writing pauses
WINDOW = 2**30  # bytes of our windows, per stream and connection: bodies are limited by other means
LARGEST_TAKEN = 2**17  # bytes of a received frame
WANTED = h2_frames.settings(
    {
        h2_frames.MAX_CONCURRENT_STREAMS: ASKED_STREAMS,
        h2_frames.INITIAL_WINDOW_SIZE: WINDOW,
        h2_frames.MAX_FRAME_SIZE: LARGEST_TAKEN,
        h2_frames.MAX_HEADER_LIST_SIZE: LONGEST_HEAD,
    }
) + h2_frames.window_update(0, WINDOW - h2_frames.FIRST_WINDOW)
STRANGE = h2_frames.settings(
    {
        h2_frames.MAX_CONCURRENT_STREAMS: 1,
        h2_frames.INITIAL_WINDOW_SIZE: 0,
        h2_frames.MAX_FRAME_SIZE: h2_frames.SMALLEST_FRAME,
        h2_frames.MAX_HEADER_LIST_SIZE: SHORT_HEAD,
    }
)
"""The settings sent to untrusted callers, whose bodies are not read."""


class HeaderBlock(msgspec.Struct):
    """A header block in several frames, with no other frame in between."""

    number: int
    ends_stream: bool
    content: bytearray
    since: float


class H2Connection(asyncio.BufferedProtocol):
    """One HTTP/2 connection of the server; each request is answered as soon as its response is ready."""

    def __init__(self, hooks: ServerHooks) -> None:
        self._hooks = hooks
        self._transport: asyncio.Transport | None = None
        self._out: H2Sender
        self._callers: CallerClass
        self._is_known, self._is_trusted, self._caller = False, False, ""
        self._reads_bodies, self._longest_frame, self._most_streams = True, LARGEST_TAKEN, MOST_STREAMS
        self.address, self.kept = "", 0
        self._buffer = bytearray()
        self._stuck_since = hooks.now()  # time of the first byte in the buffer
        self._has_preface = self._has_settings = False  # the preface, and the first SETTINGS, were received
        self._decoder: HpackDecoder
        self._block: HeaderBlock | None = None
        self._streams: dict[int, H2Stream] = {}
        self._highest = self._last = 0  # the highest stream that was opened, and that was processed
        self._orphans = 0  # closed streams whose request is still being worked on
        self._unacknowledged = 0  # bytes received since the last WINDOW_UPDATE of the connection
        self._noise = 0
        self._is_draining = False  # GOAWAY was sent
        self._is_unread = False  # there is a body that is not read
        self._prelude = NO_TABLE
        self.since = hooks.now()  # time of the last progress

    # ---- asyncio.BufferedProtocol -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport does not subclass it
        certificate = transport.get_extra_info("peercert")
        self._is_known, self._caller = bool(certificate), common_name(certificate)
        self._is_trusted = self._hooks.trusts(certificate)
        self.address = peer(transport)
        self._out = H2Sender(self._transport, self._streams, self._answered)
        self._transport.set_write_buffer_limits(HIGH_WATER)
        self._callers = self._hooks.register(self, "h2", trusted=self._is_trusted)
        self._decoder = HpackDecoder(self._callers.limits.head)
        self._reads_bodies = bool(self._callers.limits.bodies)
        if not self._reads_bodies:
            self._longest_frame, self._most_streams = h2_frames.SMALLEST_FRAME, 1
        self._transport.write(WANTED if self._reads_bodies else STRANGE)
        self._callers.enter(self)

    def connection_lost(self, error: Exception | None) -> None:
        """A bind under way continues, although its client is disconnected."""
        self._transport = None
        self._release()
        self._hooks.forget(self)

    def get_buffer(self, hint: int) -> memoryview:
        return self._hooks.read_buffer

    def buffer_updated(self, count: int) -> None:
        if self._transport is None:
            return
        if not self._buffer:
            self._stuck_since = self._hooks.now()
        self._buffer += self._hooks.read_buffer[:count]
        try:
            self._work()
        except H2ConnectionError as error:
            self._fail(error.code, str(error))
        self._flush()

    def pause_writing(self) -> None:
        """Read no further frame of a client that does not read its responses."""
        if self._transport is not None:
            self._out.is_held = True
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._out.is_held = False
            self._transport.resume_reading()
            self._out.pump()
            self._flush()

    # ---- frames -----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Process all complete frames."""
        buffer = self._buffer
        if not self._has_preface and not self._read_preface():
            return
        at = 0
        while len(buffer) - at >= h2_frames.HEAD.size and self._transport is not None:
            high, low, kind, flags, number = h2_frames.HEAD.unpack_from(buffer, at)
            length = high << 16 | low
            if length > self._longest_frame:
                raise H2ConnectionError(H2ErrorCode.FRAME_SIZE_ERROR, "frame exceeds SETTINGS_MAX_FRAME_SIZE")
            begin = at + h2_frames.HEAD.size
            if len(buffer) < begin + length:
                break
            at = begin + length
            self._process(kind, flags, number & LARGEST, buffer[begin:at])
        if at:
            del buffer[:at]
            self._stuck_since = self._hooks.now()

    def _read_preface(self) -> bool:
        """Whether the connection preface is complete (section 3.4)."""
        begin = bytes(self._buffer[: len(h2_frames.PREFACE)])
        if begin != h2_frames.PREFACE[: len(begin)]:
            raise H2ConnectionError(H2ErrorCode.PROTOCOL_ERROR, "invalid HTTP/2 connection preface")
        self._has_preface = len(begin) == len(h2_frames.PREFACE)
        if self._has_preface:
            del self._buffer[: len(begin)]
        return self._has_preface

    def _process(self, kind: int, flags: int, number: int, payload: bytearray) -> None:
        if not self._has_settings and (kind != h2_frames.SETTINGS or flags & ACK):
            raise H2ConnectionError(H2ErrorCode.PROTOCOL_ERROR, "the first frame must be SETTINGS")
        if self._block is not None and (kind != h2_frames.CONTINUATION or number != self._block.number):
            raise H2ConnectionError(H2ErrorCode.PROTOCOL_ERROR, "header block interrupted by another frame")
        if (kind in OF_STREAMS and not number) or (kind in OF_THE_CONNECTION and number):
            raise H2ConnectionError(H2ErrorCode.PROTOCOL_ERROR, "invalid stream identifier for this frame type")
        try:
            match kind:
                case h2_frames.DATA:
                    self._data(flags, number, payload)
                case h2_frames.HEADERS:
                    self._headers(flags, number, payload)
                case h2_frames.CONTINUATION:
                    self._continuation(flags, payload)
                case h2_frames.WINDOW_UPDATE:
                    self._window_update(number, payload)
                case h2_frames.RST_STREAM:
                    self._reset_by_client(number, payload)
                case h2_frames.SETTINGS:
                    self._settings(flags, payload)
                case h2_frames.PING:
                    self._ping(flags, payload)
                case h2_frames.PUSH_PROMISE:
                    raise H2ConnectionError(H2ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE received from a client")
                case _:  # PRIORITY, GOAWAY, and unknown types
                    self._count_noise()
        except H2StreamError as error:
            self._reset(number, error.code)
            self._count_noise(1 if error.code == H2ErrorCode.REFUSED_STREAM else RESET_NOISE)

    def _count_noise(self, times: int = 1) -> None:
        """Count a control frame. Some are needed; a flood of them ends the connection."""
        self._noise += times
        if self._noise > MOST_NOISE:
            raise H2ConnectionError(H2ErrorCode.ENHANCE_YOUR_CALM, "too many control frames")

    def _opened(self, number: int) -> H2Stream | None:
        """The stream, or None if it is closed. An idle stream is an error (section 5.1)."""
        if number > self._highest:
            raise H2ConnectionError(H2ErrorCode.PROTOCOL_ERROR, "frame on an idle stream")
        return self._streams.get(number)

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _headers(self, flags: int, number: int, payload: bytearray) -> None:
        if flags & PADDED:
            payload = h2_frames.unpadded(payload)
        if flags & WITH_PRIORITY:
            if len(payload) < PRIORITY_SIZE:
                raise H2ConnectionError(H2ErrorCode.FRAME_SIZE_ERROR, "HEADERS frame too short for its priority fields")
            del payload[:PRIORITY_SIZE]
        self._block = HeaderBlock(number, bool(flags & END_STREAM), payload, self._hooks.now())
        self._add_to_block(flags)

    def _continuation(self, flags: int, payload: bytearray) -> None:
        if self._block is None:
            raise H2ConnectionError(H2ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        if not payload:
            self._count_noise()
        self._block.content += payload
        self._add_to_block(flags)

    def _add_to_block(self, flags: int) -> None:
        block = self._block
        assert block is not None
        if len(block.content) > self._callers.limits.head:
            raise H2ConnectionError(
                H2ErrorCode.ENHANCE_YOUR_CALM, f"header block exceeds {self._callers.limits.head} bytes"
            )
        if flags & END_HEADERS:
            self._block = None
            self._open_stream(block)

    def _open_stream(self, block: HeaderBlock) -> None:
        """The header block is complete. It is always decoded, because later blocks refer to its entries."""
        try:
            fields = self._decoder.decode(block.content)
        except Malformed as error:
            code = H2ErrorCode.ENHANCE_YOUR_CALM if error.status == TOO_LONG else H2ErrorCode.COMPRESSION_ERROR
            raise H2ConnectionError(code, str(error)) from error
        if block.number <= self._highest:
            self._trailers(block, fields)
            return
        if block.number % 2 == 0:
            raise H2ConnectionError(H2ErrorCode.PROTOCOL_ERROR, "a client's stream identifiers must be odd")
        self._highest = block.number
        if self._is_draining:
            self._count_noise()
            return  # above the last stream in GOAWAY: the client retries on another connection
        self._last = block.number
        head = read_fields(fields)
        if self._is_full():
            raise H2StreamError(H2ErrorCode.REFUSED_STREAM, "too many concurrent streams or unread responses")
        stream = H2Stream(block.number, head, self._out.first_window, block.since)
        self._streams[block.number] = stream
        self.since = block.since
        self._callers = self._hooks.classed(self, self._callers, head.path)
        if self._transport is None:
            return  # the new class may have evicted this connection
        if not self._reads_bodies:
            self._count_noise(STRANGE_NOISE)
        if block.ends_stream or not self._reads_bodies:
            self._ask(stream, is_unread=not block.ends_stream)

    def _is_full(self) -> bool:
        return len(self._streams) + self._orphans >= self._most_streams or self._out.waiting > MOST_WAITING

    def _trailers(self, block: HeaderBlock, fields: list[Field]) -> None:
        """Trailers end the body; their content is validated and ignored."""
        stream = self._streams.get(block.number)
        if stream is None or stream.is_whole:
            self._count_noise()
            raise H2StreamError(H2ErrorCode.STREAM_CLOSED, "HEADERS on a closed stream")
        if not block.ends_stream:
            raise H2StreamError(H2ErrorCode.PROTOCOL_ERROR, "trailers without END_STREAM")
        for name, value in fields:
            check_plain(name, value)
        self._ask(stream)

    def _data(self, flags: int, number: int, payload: bytearray) -> None:
        self._replenish(len(payload))
        stream = self._opened(number)
        if flags & PADDED:
            payload = h2_frames.unpadded(payload)
        if stream is None or not self._reads_bodies:
            self._count_noise()  # sent before the client saw the reset, or a body that is not read
            return
        if stream.is_whole:
            raise H2StreamError(H2ErrorCode.STREAM_CLOSED, "DATA after END_STREAM")
        if flags & END_STREAM == 0 and not payload:
            self._count_noise()
        stream.take(payload, self._hooks.limit)
        if flags & END_STREAM:
            self._ask(stream)
            return
        self._keep(stream, len(stream.body))
        if self.kept > MOST_BODIES * self._hooks.limit:
            raise H2StreamError(H2ErrorCode.ENHANCE_YOUR_CALM, "incomplete bodies exceed the limit")

    def _keep(self, stream: H2Stream, size: int) -> None:
        """Count bytes of an incomplete body. A body in one frame is never counted."""
        more, stream.kept = size - stream.kept, size
        if more:
            self._callers.keep(self, self.kept + more)

    def _replenish(self, size: int) -> None:
        """Padding and ignored DATA count too (section 6.9.1). A stream's window is large enough for any body."""
        self._unacknowledged += size
        if self._unacknowledged >= WINDOW // 2:
            self._out.send(h2_frames.window_update(0, self._unacknowledged))
            self._unacknowledged = 0

    # ---- responses --------------------------------------------------------------------------------------------------

    def _ask(self, stream: H2Stream, *, is_unread: bool = False) -> None:
        """Pass a request to the server. `is_unread`: its body is not read, and its response is the connection's
        last."""
        if is_unread:
            stream.is_whole = self._is_unread = True
        else:
            stream.end()
        body, stream.body = bytes(stream.body), bytearray()
        self._keep(stream, 0)
        head, is_too_large = stream.head, stream.size > self._hooks.limit
        request = Request(
            head.method,
            head.path,
            body,
            is_too_large,
            self._is_known,
            head.query,
            head.fields,
            self._caller,
            self._is_trusted,
        )
        answer = respond(self._hooks, request)
        if isinstance(answer, Response):
            self._send(stream, answer)
        elif isinstance(answer, Streamed):
            self._hooks.work(asyncio.ensure_future(self._stream(stream, answer)))
        else:
            self._hooks.work(asyncio.ensure_future(self._wait_for(stream, request, answer)))

    async def _wait_for(self, stream: H2Stream, request: Request, answer: Awaitable[Reply]) -> None:
        response: Reply | None = None
        try:
            response = await answer
        except Exception:
            response = internal_error(request)
        finally:
            if response is None:  # cancelled: the server is stopping
                self._reset(stream.number, H2ErrorCode.INTERNAL_ERROR)
            if self._streams.get(stream.number) is not stream:
                self._orphans -= 1
            self._flush()
        if isinstance(response, Streamed):
            await self._stream(stream, response)
            return
        self._send(stream, response)
        self._flush()

    async def _stream(self, stream: H2Stream, streamed: Streamed) -> None:
        """Send piece by piece, the next when this one was sent, until the generator ends or the client disconnects."""
        stream.streaming = asyncio.current_task()
        try:
            async with aclosing(streamed.pieces) as pieces:
                if self._streams.get(stream.number) is not stream:
                    return
                self._out.begin(stream, self._with_prelude(stream_fields(streamed.status, streamed.content_type)))
                self._flush()
                async for piece in pieces:
                    self._account(stream, len(piece))
                    self._out.add(stream, piece)
                    self._count(stream, piece)
                    self._flush()
                    await stream.all_taken()
            stream.streaming = None
            self._out.end(stream)
        finally:
            if stream.streaming is not None:  # an exception, the server is stopping, or the client disconnected
                stream.streaming = None
                if self._streams.get(stream.number) is stream:
                    self._reset(stream.number, H2ErrorCode.INTERNAL_ERROR)
            self._flush()

    def _with_prelude(self, fields: bytes) -> bytes:
        prelude, self._prelude = self._prelude, b""
        return prelude + fields

    def _account(self, stream: H2Stream, size: int) -> None:
        self.since = stream.since = self._hooks.now()
        self._noise = max(-MOST_CREDIT, self._noise - 1 - size // ACCOUNTED)

    def _send(self, stream: H2Stream, response: Response) -> None:
        if self._streams.get(stream.number) is not stream:
            return  # the stream was reset
        body = response.body
        self._account(stream, len(body))
        fields = self._with_prelude(answer_fields(response.status, response.content_type, len(body)))
        body = b"" if stream.head.method == "HEAD" else body
        self._out.answer(stream, fields, body)
        self._count(stream, body)
        if response.close or self._is_unread or self._hooks.is_stopping:
            self.drain()

    def _count(self, stream: H2Stream, body: bytes) -> None:
        """A response that was not sent at once counts against the limit of its class until it was sent."""
        if stream.rest:
            stream.answer = body
            self._callers.begin(self, body)

    def _answered(self, stream: H2Stream) -> None:
        """The response was sent, or its stream was reset."""
        body, stream.answer = stream.answer, b""
        if body:
            self._callers.end(self, body)

    @property
    def is_served(self) -> bool:
        """True while a POST is being answered: a bind is not cut off. A GET can be retried."""
        return any(stream.is_working and stream.head.method == "POST" for stream in self._streams.values())

    def _flush(self) -> None:
        if self._transport is not None:
            self._out.flush()

    # ---- control frames of the connection ---------------------------------------------------------------------------

    def _settings(self, flags: int, payload: bytearray) -> None:
        self._count_noise()
        if flags & ACK:
            if payload:
                raise H2ConnectionError(H2ErrorCode.FRAME_SIZE_ERROR, "SETTINGS ACK with a payload")
            return
        self._has_settings = True
        if len(payload) > MOST_SETTINGS * h2_frames.SETTING.size:
            raise H2ConnectionError(H2ErrorCode.ENHANCE_YOUR_CALM, "too many settings in one frame")
        settings = dict(h2_frames.settings_in(payload))  # the last value of a repeated setting (section 6.5.3)
        if h2_frames.INITIAL_WINDOW_SIZE in settings:
            self._out.set_first_window(settings[h2_frames.INITIAL_WINDOW_SIZE])
        self._out.largest = settings.get(h2_frames.MAX_FRAME_SIZE, self._out.largest)
        self._out.send(h2_frames.frame(h2_frames.SETTINGS, ACK))

    def _ping(self, flags: int, payload: bytearray) -> None:
        self._count_noise()
        if len(payload) != PING_SIZE:
            raise H2ConnectionError(H2ErrorCode.FRAME_SIZE_ERROR, "PING payload must be 8 bytes long")
        if not flags & ACK:
            self._out.send(h2_frames.frame(h2_frames.PING, ACK, 0, bytes(payload)))

    def _window_update(self, number: int, payload: bytearray) -> None:
        self._count_noise()
        increment = h2_frames.word_in(payload) & LARGEST
        stream = self._opened(number) if number else None
        if number and stream is None:
            return  # its response was sent
        if not increment:
            raise H2ConnectionError(H2ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE increment is 0")
        self._out.widen(stream, increment)

    # ---- closing ----------------------------------------------------------------------------------------------------

    def _reset_by_client(self, number: int, payload: bytearray) -> None:
        h2_frames.word_in(payload)
        stream = self._opened(number)
        self._count_noise(RESET_NOISE)
        if stream is not None:
            self._drop(stream)

    def _reset(self, number: int, code: H2ErrorCode) -> None:
        stream = self._streams.get(number)
        if stream is not None:
            self._drop(stream)
        if self._transport is not None:
            self._out.send(h2_frames.reset(number, code))

    def _drop(self, stream: H2Stream) -> None:
        """Forget a reset stream. Work that was started continues, and counts as an orphan."""
        del self._streams[stream.number]
        self._out.forget(stream)
        self._keep(stream, 0)
        self._orphans += stream.is_working
        if stream.streaming is not None:
            stream.streaming.cancel()

    def sweep(self, now: float) -> None:
        """Reset slow streams; close a connection that is idle, or stuck in the middle of a frame."""
        self._noise, limits = min(self._noise, 0), self._callers.limits
        for stream in list(self._streams.values()):
            if not stream.waits_for_us and now - stream.since > max(limits.slow, min(limits.answer, SLOW)):
                self._reset(stream.number, H2ErrorCode.CANCEL)
        self._flush()
        is_idle, is_drained = not self._streams and not self._orphans, self._is_draining and not self._out.is_held
        if self._is_stuck(now) or (is_idle and (is_drained or now - self.since > limits.idle)):
            self.close()

    def _is_stuck(self, now: float) -> bool:
        """Whether a frame or a header block is incomplete for too long."""
        since = self._block.since if self._block is not None else self._stuck_since
        is_half = self._buffer or self._block is not None or not self._has_settings
        return bool(is_half) and now - since > self._callers.limits.slow

    def drain(self) -> None:
        """Send GOAWAY: accept no further request, answer those that were received. Go then opens a new connection."""
        if self._transport is not None and not self._is_draining:
            self._is_draining = True
            self._out.send(h2_frames.goaway(self._last, H2ErrorCode.NO_ERROR))
            self._flush()

    def close(self) -> None:
        self.drain()
        self._close_transport()

    def _fail(self, code: H2ErrorCode, reason: str) -> None:
        """End the connection with an error."""
        if self._transport is not None:
            self._out.send(h2_frames.goaway(self._last, code, reason))
        self._close_transport()

    def _close_transport(self) -> None:
        transport = self._transport
        if transport is None:
            return
        self._flush()
        self._transport = None
        self._release()
        if self._out.is_held:
            transport.abort()  # the client does not read: a graceful close would wait for ever
        else:
            transport.close()

    def cut(self) -> None:
        transport, self._transport = self._transport, None
        self._release()
        if transport is not None:
            transport.abort()

    def _release(self) -> None:
        self._callers.leave(self)
        for stream in self._streams.values():
            if stream.streaming is not None:
                stream.streaming.cancel()
        self._streams.clear()


OF_STREAMS = frozenset(
    {h2_frames.DATA, h2_frames.HEADERS, h2_frames.PRIORITY, h2_frames.RST_STREAM, h2_frames.CONTINUATION}
)
OF_THE_CONNECTION = frozenset({h2_frames.SETTINGS, h2_frames.PING, h2_frames.GOAWAY})
PRIORITY_SIZE, PING_SIZE = 5, 8  # bytes
TOO_LONG = 431
