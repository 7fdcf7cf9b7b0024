"""Reads the bodies of HTTP/1.1 messages (requests and responses): of a known length, or chunked.

Call `Body.take` until it returns True, then `content`; or `pieces` after each `take` to stream. `Malformed` means that
the body is invalid. httptools reads the chunks; the bytes after the body stay in the caller's buffer.
"""

from httptools import HttpParserError, HttpRequestParser

from gputile.http.h1_head import Malformed

MOST_OVERHEAD = 65536  # bytes without data between two pieces of a chunked body: sizes, extensions, trailers
CHUNKED = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"  # after it, httptools expects chunks
END = b"\r\n\r\n"  # of every chunked body; data may contain it too


class Body:
    """Collects a body as it arrives; a body beyond the limit is counted and dropped."""

    def __init__(self, length: int | None, limit: int) -> None:
        """`length`: in bytes, None if the body is chunked. `limit`: bytes that are kept at most."""
        self._limit, self._missing = limit, length or 0
        self._received = bytearray()
        self._size = self._overhead = 0
        self._is_whole = False  # the last chunk and the trailers were received
        self._chunks: HttpRequestParser | None = None
        if length is None:
            self._chunks = HttpRequestParser(self)
            self._chunks.feed_data(CHUNKED)

    @property
    def is_too_large(self) -> bool:
        return self._size > self._limit

    def content(self) -> bytes:
        return b"" if self.is_too_large else bytes(self._received)

    @property
    def held(self) -> int:
        """Bytes that were received and not consumed yet."""
        return len(self._received)

    def pieces(self) -> bytes:
        """The bytes received since the last call."""
        received = bytes(self._received)
        self._received.clear()
        return received

    def take(self, buffer: bytearray) -> bool:
        """Move the body's bytes out of `buffer`; return whether the body is complete."""
        if self._chunks is not None:
            return self._take_chunks(self._chunks, buffer)
        part = buffer[: self._missing]
        del buffer[: len(part)]
        self._missing -= len(part)
        self.on_body(part)
        return not self._missing

    def _take_chunks(self, chunks: HttpRequestParser, buffer: bytearray) -> bool:
        """Pass the parser no byte beyond the end of the body: it cannot tell where it stopped."""
        while not self._is_whole and (count := _unambiguous(buffer)):
            part = bytes(buffer[:count])
            del buffer[:count]
            size = self._size
            try:
                chunks.feed_data(part)
            except HttpParserError as error:
                raise Malformed(400, "malformed chunked body: a chunk or the trailer section is invalid") from error
            self._overhead = self._overhead + count if self._size == size else 0
            if self._overhead > MOST_OVERHEAD:
                raise Malformed(400, f"chunk extension or trailer section exceeds {MOST_OVERHEAD} bytes")
        return self._is_whole

    # ---- called by httptools ----------------------------------------------------------------------------------------

    def on_body(self, part: bytes | bytearray) -> None:
        self._size += len(part)
        if self.is_too_large:
            self._received.clear()
        else:
            self._received += part

    def on_message_complete(self) -> None:
        self._is_whole = True


def _unambiguous(buffer: bytearray) -> int:
    """How many bytes certainly do not exceed the body: up to a possible end, without the beginning of one."""
    end = buffer.find(END)
    if end >= 0:
        return end + len(END)
    begun = next((count for count in (3, 2, 1) if buffer.endswith(END[:count])), 0)
    return len(buffer) - begun
