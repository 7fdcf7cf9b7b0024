"""What we say on one connection of HTTP/2: control frames at once, bodies as far as the other side lets us.

Room:  both windows (RFC 9113, section 5.2), the answers that wait for them, and one write for all that can go.
Door:  `say`, `answer` (or `begin`, `add`, `end`), then `flush`; `widen` and `set_first_window` when the other side
       makes room.
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

AT_ONCE = 2**18  # bytes that are handed to the loop together


class H2Sender:
    """The sending side."""

    def __init__(
        self, transport: asyncio.Transport, streams: dict[int, H2Stream], answered: Callable[[H2Stream], None]
    ) -> None:
        """`streams`: all that are open. Whoever has its whole answer leaves. `answered` hears of each answer, or piece
        of one, that has gone or is not wanted any more."""
        self._transport, self._streams, self._answered = transport, streams, answered
        self._parts: list[bytes | memoryview] = []
        self._size = 0  # of the parts
        self._queue: dict[int, H2Stream] = {}  # answers that are not all sent
        self._window = FIRST_WINDOW  # of the connection
        self.first_window = FIRST_WINDOW  # of a new stream
        self.largest = SMALLEST_FRAME  # that the other side takes
        self.is_held = False  # the loop has more than it can send
        self.waiting = 0  # bytes of answers that could not be sent yet

    def say(self, part: bytes | memoryview) -> None:
        self._parts.append(part)
        self._size += len(part)
        if self._size > AT_ONCE:
            self.flush()

    def flush(self) -> None:
        if self._parts:
            parts, self._parts, self._size = self._parts, [], 0
            self._transport.write(b"".join(parts))

    # ---- answers ----------------------------------------------------------------------------------------------------

    def answer(self, stream: H2Stream, fields: bytes, body: bytes) -> None:
        """Headers go at once: they are under no window."""
        stream.rest = memoryview(body)
        if not body:
            self.say(frame(HEADERS, END_HEADERS | END_STREAM, stream.number, fields))
            del self._streams[stream.number]
            return
        self.say(frame(HEADERS, END_HEADERS, stream.number, fields))
        self._queue[stream.number] = stream
        self.waiting += len(body)
        self._push(stream)

    def begin(self, stream: H2Stream, fields: bytes) -> None:
        """An answer that comes piece by piece."""
        stream.rest, stream.is_open = memoryview(b""), True
        self.say(frame(HEADERS, END_HEADERS, stream.number, fields))

    def add(self, stream: H2Stream, piece: bytes) -> None:
        """Its next piece; the one before has gone."""
        if piece:
            stream.rest = memoryview(piece)
            self._queue[stream.number] = stream
            self.waiting += len(piece)
            self._push(stream)

    def end(self, stream: H2Stream) -> None:
        self.say(frame(DATA, END_STREAM, stream.number))
        stream.is_open = False
        del self._streams[stream.number]

    def pump(self) -> None:
        """Send what can go, the oldest answer first."""
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
            self.say(head(DATA, 0 if stream.rest or stream.is_open else END_STREAM, stream.number, size))
            self.say(piece)
        if not stream.rest:
            del self._queue[stream.number]
            self._answered(stream)
            if stream.is_open:
                stream.wake()
            else:
                del self._streams[stream.number]

    def forget(self, stream: H2Stream) -> None:
        """Nobody wants this answer any more."""
        if self._queue.pop(stream.number, None) is not None and stream.rest is not None:
            self.waiting -= len(stream.rest)
            self._answered(stream)

    # ---- windows ----------------------------------------------------------------------------------------------------

    def widen(self, stream: H2Stream | None, more: int) -> None:
        """WINDOW_UPDATE: of one stream, or of the connection (section 6.9)."""
        if stream is None:
            self._window += more
            if self._window > LARGEST:
                raise H2ConnectionError(H2ErrorCode.FLOW_CONTROL_ERROR, "a window beyond all windows")
            self.pump()
            return
        stream.window += more
        if stream.window > LARGEST:
            raise H2StreamError(H2ErrorCode.FLOW_CONTROL_ERROR, "a window beyond all windows")
        if stream.number in self._queue:
            self._push(stream)

    def set_first_window(self, size: int) -> None:
        """Of new streams, and by the difference of those that are open: they may sink below nought (section 6.9.2)."""
        difference, self.first_window = size - self.first_window, size
        for stream in self._streams.values():
            stream.window += difference
            if stream.window > LARGEST:
                raise H2ConnectionError(H2ErrorCode.FLOW_CONTROL_ERROR, "a window beyond all windows")
        self.pump()
