"""HTTP/2 (RFC 9113) over TLS: many questions at once on one connection.

Room:  bytes in, questions out to the listener, answers back. It knows nothing of verbs.
Door:  `H2Connection`, to which a listener hands a transport whose handshake chose `h2`.

kube-scheduler keeps two idle connections of HTTP/1.1 and opens a new one for every further bind under way; each
handshake costs both sides more than the call. Of HTTP/2 it keeps them all.

Anybody in the network may connect, so everything that a stranger can make us keep or do is bounded: open streams and
work for streams that were reset (`MOST_STREAMS`), bodies that are not whole (`MOST_BODIES`), answers that nobody
fetches (`MOST_WAITING`), headers, frames that ask for nothing (`MOST_NOISE`), settings (`MOST_SETTINGS`), time. What
all connections of a class may have together is bounded by `callers`. A caller without a trusted certificate has one
stream at a time, and its bodies are not read: it is answered by its headers.
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
    asked,
    broken,
    common_name,
    peer,
)

ASKED_STREAMS = 1
"""Streams at once that we ask a client to keep to, so that it opens a connection for each, and keeps them all. Go
counts a call that timed out until its connection answers again. So a client whose replica froze, or vanished with its
node, loses one call per connection and then dials anew, as with HTTP/1.1; with more streams it would stay with the dead
one until its own pings fail: for 45 seconds in kube-scheduler."""

MOST_STREAMS = 250  # that we bear: a client may begin before it has read what we ask
MOST_SETTINGS = 32  # entries of a frame; there are six that mean something
MOST_BODIES = 4  # times the limit of one body, of all that are not whole
MOST_WAITING = 16 * 2**20  # bytes of answers; who wants more has to fetch these first
MOST_NOISE = 1000  # frames between two sweeps that ask for nothing, beyond those that answers account for
ACCOUNTED = 512  # bytes of an answer that account for one such frame: Go widens its windows at every 4 KiB
MOST_CREDIT = 100_000  # frames
STRANGE_NOISE = 2  # a question of somebody whom we do not know
RESET_NOISE = 2  # a question that is taken back, or has to be, is work for nothing
HIGH_WATER = 65536  # bytes that the loop may have for the socket before we are held
WINDOW = 2**30  # bytes that we are ready to take, per stream and in sum: bodies are bounded by other means
LARGEST_TAKEN = 2**17  # bytes of a frame
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
"""What somebody is told whose bodies are not read."""


class HeaderBlock(msgspec.Struct):
    """Headers that come in several frames, with nothing in between."""

    number: int
    ends_stream: bool
    content: bytearray
    since: float


class H2Connection(asyncio.BufferedProtocol):
    """One client. Its questions are answered as soon as each can be."""

    def __init__(self, host: ServerHooks) -> None:
        self._host = host
        self._transport: asyncio.Transport | None = None
        self._out: H2Sender
        self._callers: CallerClass
        self._is_known, self._is_trusted, self._caller = False, False, ""
        self._reads_bodies, self._longest_frame, self._most_streams = True, LARGEST_TAKEN, MOST_STREAMS
        self.address, self.kept = "", 0
        self._buffer = bytearray()
        self._stuck_since = host.now()  # when what is in the buffer began
        self._is_greeted = self._is_set = False  # the preface came; the first settings came
        self._decoder: HpackDecoder
        self._block: HeaderBlock | None = None
        self._streams: dict[int, H2Stream] = {}
        self._highest = self._last = 0  # the highest stream that was opened, and that we took
        self._orphans = 0  # streams that are gone, and still worked on
        self._taken = 0  # bytes since we last widened the connection's window
        self._noise = 0
        self._is_leaving = False  # GOAWAY is said
        self._is_unread = False  # there is a body that we do not want
        self._prelude = NO_TABLE
        self.since = host.now()  # when the last thing happened that counts

    # ---- what the loop calls ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        certificate = transport.get_extra_info("peercert")
        self._is_known, self._caller = bool(certificate), common_name(certificate)
        self._is_trusted = self._host.trusts(certificate)
        self.address = peer(transport)
        self._out = H2Sender(self._transport, self._streams, self._answered)
        self._transport.set_write_buffer_limits(HIGH_WATER)
        self._callers = self._host.register(self, "h2", trusted=self._is_trusted)
        self._decoder = HpackDecoder(self._callers.limits.head)
        self._reads_bodies = bool(self._callers.limits.bodies)
        if not self._reads_bodies:
            self._longest_frame, self._most_streams = h2_frames.SMALLEST_FRAME, 1
        self._transport.write(WANTED if self._reads_bodies else STRANGE)
        self._callers.enter(self)

    def connection_lost(self, wrong: Exception | None) -> None:
        """What is being worked on goes on: a bind that was asked for is a bind."""
        self._transport = None
        self._let_go()
        self._host.forget(self)

    def get_buffer(self, hint: int) -> memoryview:
        return self._host.read_buffer

    def buffer_updated(self, count: int) -> None:
        if self._transport is None:
            return
        if not self._buffer:
            self._stuck_since = self._host.now()
        self._buffer += self._host.read_buffer[:count]
        try:
            self._work()
        except H2ConnectionError as fault:
            self._end(fault.code, str(fault))
        self._flush()

    def pause_writing(self) -> None:
        """Whoever does not read what we say has to wait with what he wants to say."""
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
        """Take all frames that are whole."""
        buffer = self._buffer
        if not self._is_greeted and not self._greet():
            return
        at = 0
        while len(buffer) - at >= h2_frames.HEAD.size and self._transport is not None:
            high, low, kind, flags, number = h2_frames.HEAD.unpack_from(buffer, at)
            length = high << 16 | low
            if length > self._longest_frame:
                raise H2ConnectionError(H2ErrorCode.FRAME_SIZE_ERROR, "a frame is larger than we take")
            begin = at + h2_frames.HEAD.size
            if len(buffer) < begin + length:
                break
            at = begin + length
            self._take(kind, flags, number & LARGEST, buffer[begin:at])
        if at:
            del buffer[:at]
            self._stuck_since = self._host.now()

    def _greet(self) -> bool:
        """The preface (section 3.4)."""
        begin = bytes(self._buffer[: len(h2_frames.PREFACE)])
        if begin != h2_frames.PREFACE[: len(begin)]:
            raise H2ConnectionError(H2ErrorCode.PROTOCOL_ERROR, "this is no HTTP/2")
        self._is_greeted = len(begin) == len(h2_frames.PREFACE)
        if self._is_greeted:
            del self._buffer[: len(begin)]
        return self._is_greeted

    def _take(self, kind: int, flags: int, number: int, payload: bytearray) -> None:
        if not self._is_set and (kind != h2_frames.SETTINGS or flags & ACK):
            raise H2ConnectionError(H2ErrorCode.PROTOCOL_ERROR, "settings come first")
        if self._block is not None and (kind != h2_frames.CONTINUATION or number != self._block.number):
            raise H2ConnectionError(H2ErrorCode.PROTOCOL_ERROR, "headers are cut in two")
        if (kind in OF_STREAMS and not number) or (kind in OF_THE_CONNECTION and number):
            raise H2ConnectionError(H2ErrorCode.PROTOCOL_ERROR, "a frame is on the wrong stream")
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
                    self._reset_by_them(number, payload)
                case h2_frames.SETTINGS:
                    self._settings(flags, payload)
                case h2_frames.PING:
                    self._ping(flags, payload)
                case h2_frames.PUSH_PROMISE:
                    raise H2ConnectionError(H2ErrorCode.PROTOCOL_ERROR, "a client cannot promise anything")
                case _:  # priorities, farewells, and what is yet to be invented
                    self._note()
        except H2StreamError as fault:
            self._reset(number, fault.code)
            self._note(1 if fault.code == H2ErrorCode.REFUSED_STREAM else RESET_NOISE)

    def _note(self, times: int = 1) -> None:
        """A frame that asks for nothing. Some are needed; a flood of them is not."""
        self._noise += times
        if self._noise > MOST_NOISE:
            raise H2ConnectionError(H2ErrorCode.ENHANCE_YOUR_CALM, "too many frames that ask for nothing")

    def _known(self, number: int) -> H2Stream | None:
        """The stream, if it is still open. One that nobody has opened is an error (section 5.1)."""
        if number > self._highest:
            raise H2ConnectionError(H2ErrorCode.PROTOCOL_ERROR, "a stream that was never opened")
        return self._streams.get(number)

    # ---- a question -------------------------------------------------------------------------------------------------

    def _headers(self, flags: int, number: int, payload: bytearray) -> None:
        if flags & PADDED:
            payload = h2_frames.unpadded(payload)
        if flags & WITH_PRIORITY:
            if len(payload) < PRIORITY_SIZE:
                raise H2ConnectionError(H2ErrorCode.FRAME_SIZE_ERROR, "headers without their priority")
            del payload[:PRIORITY_SIZE]
        self._block = HeaderBlock(number, bool(flags & END_STREAM), payload, self._host.now())
        self._add_to_block(flags)

    def _continuation(self, flags: int, payload: bytearray) -> None:
        if self._block is None:
            raise H2ConnectionError(H2ErrorCode.PROTOCOL_ERROR, "headers go on that never began")
        if not payload:
            self._note()
        self._block.content += payload
        self._add_to_block(flags)

    def _add_to_block(self, flags: int) -> None:
        block = self._block
        assert block is not None
        if len(block.content) > self._callers.limits.head:
            raise H2ConnectionError(H2ErrorCode.ENHANCE_YOUR_CALM, "the headers are too long")
        if flags & END_HEADERS:
            self._block = None
            self._begin(block)

    def _begin(self, block: HeaderBlock) -> None:
        """The headers are whole. They are read even if nobody wants them, for later ones refer to them."""
        try:
            fields = self._decoder.decode(block.content)
        except Malformed as wrong:
            code = H2ErrorCode.ENHANCE_YOUR_CALM if wrong.status == TOO_LONG else H2ErrorCode.COMPRESSION_ERROR
            raise H2ConnectionError(code, str(wrong)) from wrong
        if block.number <= self._highest:
            self._trailers(block, fields)
            return
        if block.number % 2 == 0:
            raise H2ConnectionError(H2ErrorCode.PROTOCOL_ERROR, "a client's streams have odd numbers")
        self._highest = block.number
        if self._is_leaving:
            self._note()
            return  # above the last that GOAWAY named: it will be asked elsewhere
        self._last = block.number
        head = read_fields(fields)
        if self._is_full():
            raise H2StreamError(H2ErrorCode.REFUSED_STREAM, "too much at once")
        stream = H2Stream(block.number, head, self._out.first_window, block.since)
        self._streams[block.number] = stream
        self.since = block.since
        self._callers = self._host.classed(self, self._callers, head.path)
        if self._transport is None:
            return  # all places may be those of others
        if not self._reads_bodies:
            self._note(STRANGE_NOISE)
        if block.ends_stream or not self._reads_bodies:
            self._ask(stream, is_unread=not block.ends_stream)

    def _is_full(self) -> bool:
        return len(self._streams) + self._orphans >= self._most_streams or self._out.waiting > MOST_WAITING

    def _trailers(self, block: HeaderBlock, fields: list[Field]) -> None:
        """Headers behind a body: nothing in them matters, but that it ends here."""
        stream = self._streams.get(block.number)
        if stream is None or stream.is_whole:
            self._note()
            raise H2StreamError(H2ErrorCode.STREAM_CLOSED, "headers on a stream that has ended")
        if not block.ends_stream:
            raise H2StreamError(H2ErrorCode.PROTOCOL_ERROR, "headers in the middle of a body")
        for name, value in fields:
            check_plain(name, value)
        self._ask(stream)

    def _data(self, flags: int, number: int, payload: bytearray) -> None:
        self._replenish(len(payload))
        stream = self._known(number)
        if flags & PADDED:
            payload = h2_frames.unpadded(payload)
        if stream is None or not self._reads_bodies:
            self._note()  # on its way when the stream was reset, or nobody wants it
            return
        if stream.is_whole:
            raise H2StreamError(H2ErrorCode.STREAM_CLOSED, "a body goes on after its end")
        if flags & END_STREAM == 0 and not payload:
            self._note()
        stream.take(payload, self._host.limit)
        if flags & END_STREAM:
            self._ask(stream)
            return
        self._keep(stream, len(stream.body))
        if self.kept > MOST_BODIES * self._host.limit:
            raise H2StreamError(H2ErrorCode.ENHANCE_YOUR_CALM, "too many bodies at once")

    def _keep(self, stream: H2Stream, size: int) -> None:
        """So much of its body counts as not whole. One that came in one piece never does."""
        more, stream.kept = size - stream.kept, size
        if more:
            self._callers.keep(self, self.kept + more)

    def _replenish(self, size: int) -> None:
        """Padding and what nobody wants count too (section 6.9.1). A stream's window is large enough for any body."""
        self._taken += size
        if self._taken >= WINDOW // 2:
            self._out.say(h2_frames.window_update(0, self._taken))
            self._taken = 0

    # ---- an answer --------------------------------------------------------------------------------------------------

    def _ask(self, stream: H2Stream, *, is_unread: bool = False) -> None:
        """`is_unread`: there is a body that we do not want. Its answer is the last on this connection."""
        if is_unread:
            stream.is_whole = self._is_unread = True
        else:
            stream.end()
        body, stream.body = bytes(stream.body), bytearray()
        self._keep(stream, 0)
        head, is_too_large = stream.head, stream.size > self._host.limit
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
        answer = asked(self._host, request)
        if isinstance(answer, Response):
            self._send(stream, answer)
        elif isinstance(answer, Streamed):
            self._host.work(asyncio.ensure_future(self._pour(stream, answer)))
        else:
            self._host.work(asyncio.ensure_future(self._wait_for(stream, request, answer)))

    async def _wait_for(self, stream: H2Stream, request: Request, answer: Awaitable[Reply]) -> None:
        response: Reply | None = None
        try:
            response = await answer
        except Exception:
            response = broken(request)
        finally:
            if response is None:  # we are stopping
                self._reset(stream.number, H2ErrorCode.INTERNAL_ERROR)
            if self._streams.get(stream.number) is not stream:
                self._orphans -= 1
            self._flush()
        if isinstance(response, Streamed):
            await self._pour(stream, response)
            return
        self._send(stream, response)
        self._flush()

    async def _pour(self, stream: H2Stream, streamed: Streamed) -> None:
        """Piece by piece, the next when this one has gone. Whoever resets the stream, or hangs up, ends it."""
        stream.pouring = asyncio.current_task()
        try:
            async with aclosing(streamed.pieces) as pieces:
                if self._streams.get(stream.number) is not stream:
                    return
                self._out.begin(stream, self._headed(stream_fields(streamed.status, streamed.content_type)))
                self._flush()
                async for piece in pieces:
                    self._account(stream, len(piece))
                    self._out.add(stream, piece)
                    self._count(stream, piece)
                    self._flush()
                    await stream.all_taken()
            stream.pouring = None
            self._out.end(stream)
        finally:
            if stream.pouring is not None:  # a bug, or we are stopping, or nobody listens
                stream.pouring = None
                if self._streams.get(stream.number) is stream:
                    self._reset(stream.number, H2ErrorCode.INTERNAL_ERROR)
            self._flush()

    def _headed(self, fields: bytes) -> bytes:
        prelude, self._prelude = self._prelude, b""
        return prelude + fields

    def _account(self, stream: H2Stream, size: int) -> None:
        self.since = stream.since = self._host.now()
        self._noise = max(-MOST_CREDIT, self._noise - 1 - size // ACCOUNTED)

    def _send(self, stream: H2Stream, response: Response) -> None:
        if self._streams.get(stream.number) is not stream:
            return  # nobody waits for it any more
        body = response.body
        self._account(stream, len(body))
        fields = self._headed(answer_fields(response.status, response.content_type, len(body)))
        body = b"" if stream.head.method == "HEAD" else body
        self._out.answer(stream, fields, body)
        self._count(stream, body)
        if response.close or self._is_unread or self._host.is_stopping:
            self.drain()

    def _count(self, stream: H2Stream, body: bytes) -> None:
        """What could not be sent at once counts among the answers of its class until it has gone."""
        if stream.rest:
            stream.answer = body
            self._callers.begin(self, body)

    def _answered(self, stream: H2Stream) -> None:
        """All of it has gone, or nobody wants it any more."""
        body, stream.answer = stream.answer, b""
        if body:
            self._callers.end(self, body)

    @property
    def is_served(self) -> bool:
        """A bind that was asked for is not cut off. Pages can be asked for again."""
        return any(stream.is_working and stream.head.method == "POST" for stream in self._streams.values())

    def _flush(self) -> None:
        if self._transport is not None:
            self._out.flush()

    # ---- the connection's own frames --------------------------------------------------------------------------------

    def _settings(self, flags: int, payload: bytearray) -> None:
        self._note()
        if flags & ACK:
            if payload:
                raise H2ConnectionError(H2ErrorCode.FRAME_SIZE_ERROR, "an acknowledgement with something in it")
            return
        self._is_set = True
        if len(payload) > MOST_SETTINGS * h2_frames.SETTING.size:
            raise H2ConnectionError(H2ErrorCode.ENHANCE_YOUR_CALM, "more settings than there are")
        wanted = dict(h2_frames.settings_in(payload))  # of two with one name the last (section 6.5.3)
        if h2_frames.INITIAL_WINDOW_SIZE in wanted:
            self._out.set_first_window(wanted[h2_frames.INITIAL_WINDOW_SIZE])
        self._out.largest = wanted.get(h2_frames.MAX_FRAME_SIZE, self._out.largest)
        self._out.say(h2_frames.frame(h2_frames.SETTINGS, ACK))

    def _ping(self, flags: int, payload: bytearray) -> None:
        self._note()
        if len(payload) != PING_SIZE:
            raise H2ConnectionError(H2ErrorCode.FRAME_SIZE_ERROR, "a ping of a strange length")
        if not flags & ACK:
            self._out.say(h2_frames.frame(h2_frames.PING, ACK, 0, bytes(payload)))

    def _window_update(self, number: int, payload: bytearray) -> None:
        self._note()
        more = h2_frames.word_in(payload) & LARGEST
        stream = self._known(number) if number else None
        if number and stream is None:
            return  # it has its answer
        if not more:
            raise H2ConnectionError(H2ErrorCode.PROTOCOL_ERROR, "a window is widened by nothing")
        self._out.widen(stream, more)

    # ---- ends -------------------------------------------------------------------------------------------------------

    def _reset_by_them(self, number: int, payload: bytearray) -> None:
        h2_frames.word_in(payload)
        stream = self._known(number)
        self._note(RESET_NOISE)
        if stream is not None:
            self._drop(stream)

    def _reset(self, number: int, code: H2ErrorCode) -> None:
        stream = self._streams.get(number)
        if stream is not None:
            self._drop(stream)
        if self._transport is not None:
            self._out.say(h2_frames.reset(number, code))

    def _drop(self, stream: H2Stream) -> None:
        """The answer has nobody to go to. Work that was begun goes on, and counts."""
        del self._streams[stream.number]
        self._out.forget(stream)
        self._keep(stream, 0)
        self._orphans += stream.is_working
        if stream.pouring is not None:
            stream.pouring.cancel()

    def sweep(self, now: float) -> None:
        """Let go of those who sleep, or take for ever to say what they want or to take what they wanted."""
        self._noise, limits = min(self._noise, 0), self._callers.limits
        for stream in list(self._streams.values()):
            if not stream.waits_for_us and now - stream.since > max(limits.slow, min(limits.answer, SLOW)):
                self._reset(stream.number, H2ErrorCode.CANCEL)
        self._flush()
        is_idle, is_fetched = not self._streams and not self._orphans, self._is_leaving and not self._out.is_held
        if self._is_stuck(now) or (is_idle and (is_fetched or now - self.since > limits.idle)):
            self.close()

    def _is_stuck(self, now: float) -> bool:
        """In the middle of a frame, or of headers."""
        since = self._block.since if self._block is not None else self._stuck_since
        is_half = self._buffer or self._block is not None or not self._is_set
        return bool(is_half) and now - since > self._callers.limits.slow

    def drain(self) -> None:
        """Take no further question, answer those that were asked. Go then opens another connection for its next."""
        if self._transport is not None and not self._is_leaving:
            self._is_leaving = True
            self._out.say(h2_frames.goaway(self._last, H2ErrorCode.NO_ERROR))
            self._flush()

    def close(self) -> None:
        self.drain()
        self._hang_up()

    def _end(self, code: H2ErrorCode, why: str) -> None:
        """Something is wrong with all of it."""
        if self._transport is not None:
            self._out.say(h2_frames.goaway(self._last, code, why))
        self._hang_up()

    def _hang_up(self) -> None:
        transport = self._transport
        if transport is None:
            return
        self._flush()
        self._transport = None
        self._let_go()
        if self._out.is_held:
            transport.abort()  # he does not read: what we said would wait for ever
        else:
            transport.close()

    def cut(self) -> None:
        transport, self._transport = self._transport, None
        self._let_go()
        if transport is not None:
            transport.abort()

    def _let_go(self) -> None:
        self._callers.leave(self)
        for stream in self._streams.values():
            if stream.pouring is not None:
                stream.pouring.cancel()
        self._streams.clear()


OF_STREAMS = frozenset(
    {h2_frames.DATA, h2_frames.HEADERS, h2_frames.PRIORITY, h2_frames.RST_STREAM, h2_frames.CONTINUATION}
)
OF_THE_CONNECTION = frozenset({h2_frames.SETTINGS, h2_frames.PING, h2_frames.GOAWAY})
PRIORITY_SIZE, PING_SIZE = 5, 8  # bytes
TOO_LONG = 431
