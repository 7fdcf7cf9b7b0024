"""The sending side of one HTTP/2 connection: control frames at once, bodies as far as flow control allows.

It owns both flow-control windows (RFC 9113, section 5.2) and the queue of response bodies that wait for them, and joins
all frames that can be sent into one write. It must not know how a response was made.
"""

import asyncio
from collections.abc import Callable

from gputile.http.h2_frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    FIRST_WINDOW,
    HEADERS,
    LARGEST,
    SMALLEST_FRAME,
    H2ConnectionError,
    H2ErrorCode,
    H2StreamError,
    frame,
    head,
)
from gputile.http.h2_streams import H2Stream

AT_ONCE = 2**18  # bytes of one write


class H2Sender:
    """Sends frames on one connection; `flush` writes those that are buffered."""

    def __init__(
        self, transport: asyncio.Transport, streams: dict[int, H2Stream], answered: Callable[[H2Stream], None]
    ) -> None:
        """`streams`: the open streams; a stream is removed after its whole response was sent. `answered` is called for
        each response, or piece of one, that was sent or is no longer wanted."""
        self._transport, self._streams, self._answered = transport, streams, answered
        self._parts: list[bytes | memoryview] = []
        self._size = 0  # of the parts
        self._queue: dict[int, H2Stream] = {}  # streams with unsent bytes of a response
        self._window = FIRST_WINDOW  # of the connection
        self.first_window = FIRST_WINDOW  # of a new stream
        self.largest = SMALLEST_FRAME  # bytes of a frame that the peer accepts
        self.is_held = False  # the transport's write buffer is full
        self.waiting = 0  # bytes of responses that wait for a window

    def send(self, part: bytes | memoryview) -> None:
        self._parts.append(part)
        self._size += len(part)
        if self._size > AT_ONCE:
            self.flush()

    def flush(self) -> None:
        if self._parts:
            parts, self._parts, self._size = self._parts, [], 0
            self._transport.write(b"".join(parts))

    # ---- responses --------------------------------------------------------------------------------------------------

    def answer(self, stream: H2Stream, fields: bytes, body: bytes) -> None:
        """Send a whole response. Headers are not subject to flow control."""
        stream.rest = memoryview(body)
        if not body:
            self.send(frame(HEADERS, END_HEADERS | END_STREAM, stream.number, fields))
            del self._streams[stream.number]
            return
        self.send(frame(HEADERS, END_HEADERS, stream.number, fields))
        self._queue[stream.number] = stream
        self.waiting += len(body)
        self._push(stream)

    def begin(self, stream: H2Stream, fields: bytes) -> None:
        """Start a streamed response."""
        stream.rest, stream.is_open = memoryview(b""), True
        self.send(frame(HEADERS, END_HEADERS, stream.number, fields))

    def add(self, stream: H2Stream, piece: bytes) -> None:
        """Send the next piece of a streamed response, after the piece before was sent."""
        if piece:
            stream.rest = memoryview(piece)
            self._queue[stream.number] = stream
            self.waiting += len(piece)
            self._push(stream)

    def end(self, stream: H2Stream) -> None:
        self.send(frame(DATA, END_STREAM, stream.number))
        stream.is_open = False
        del self._streams[stream.number]

    def pump(self) -> None:
        """Send what the windows allow, the oldest response first."""
        for stream in list(self._queue.values()):
            if self._window <= 0 or self.is_held:
                return
            self._push(stream)

    def _push(self, stream: H2Stream) -> None:
        assert stream.rest is not None
        while (size := min(len(stream.rest), self._window, stream.window, self.largest)) > 0 and not self.is_held:
            piece, stream.rest = stream.rest[:size], stream.rest[size:]
            self._window -= size
            stream.window -= size
            self.waiting -= size
            self.send(head(DATA, 0 if stream.rest or stream.is_open else END_STREAM, stream.number, size))
            self.send(piece)
        if not stream.rest:
            del self._queue[stream.number]
            self._answered(stream)
            if stream.is_open:
                stream.wake()
            else:
                del self._streams[stream.number]

    def forget(self, stream: H2Stream) -> None:
        """Drop the rest of the response: the client reset the stream."""
        if self._queue.pop(stream.number, None) is not None and stream.rest is not None:
            self.waiting -= len(stream.rest)
            self._answered(stream)

    # ---- windows ----------------------------------------------------------------------------------------------------

    def widen(self, stream: H2Stream | None, increment: int) -> None:
        """WINDOW_UPDATE of one stream, or (None) of the connection (section 6.9)."""
        if stream is None:
            self._window += increment
            if self._window > LARGEST:
                raise H2ConnectionError(H2ErrorCode.FLOW_CONTROL_ERROR, "flow-control window exceeds 2^31-1")
            self.pump()
            return
        stream.window += increment
        if stream.window > LARGEST:
            raise H2StreamError(H2ErrorCode.FLOW_CONTROL_ERROR, "flow-control window exceeds 2^31-1")
        if stream.number in self._queue:
            self._push(stream)

    def set_first_window(self, size: int) -> None:
        """Set the window of new streams, and shift those of open streams, which may become negative (section 6.9.2)."""
        difference, self.first_window = size - self.first_window, size
        for stream in self._streams.values():
            stream.window += difference
            if stream.window > LARGEST:
                raise H2ConnectionError(H2ErrorCode.FLOW_CONTROL_ERROR, "flow-control window exceeds 2^31-1")
        self.pump()
