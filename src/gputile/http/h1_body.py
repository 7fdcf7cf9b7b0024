"""Reads the bodies of HTTP/1.1 messages (requests and responses): of a known length, or chunked.

Call `Body.take` until it returns True, then `content`; or `pieces` after each `take` to stream. `Malformed` means that
the body is invalid.
"""

import re

LONGEST_LINE = 4096  # bytes, of a chunk-size line
MOST_TRAILERS = 65536  # bytes, of the trailer section
CHUNK = re.compile(rb"([0-9A-Fa-f]{1,12})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?")
TRAILER = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*")


class Malformed(Exception):
    """The received message violates the protocol; `status` is the HTTP status to respond with."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Body:
    """Collects a body as it arrives; a body beyond the limit is counted and dropped."""

    def __init__(self, length: int | None, limit: int) -> None:
        """`length`: in bytes, None if the body is chunked. `limit`: bytes that are kept at most."""
        self._limit, self._chunked = limit, length is None
        self._missing = length or 0
        self._received = bytearray()
        self._size = 0
        self._at_end = not self._chunked  # no further chunk follows
        self._after_chunk = self._in_trailer = False
        self._trailers = 0  # bytes

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
        while True:
            if self._missing:
                part = buffer[: self._missing]
                del buffer[: len(part)]
                self._missing -= len(part)
                self._size += len(part)
                if self.is_too_large:
                    self._received.clear()
                else:
                    self._received += part
                if self._missing:
                    return False
                self._after_chunk = self._chunked
            if self._at_end:
                return True
            line = _line(buffer)
            if line is None:
                return False
            self._next_chunk(line)

    def _next_chunk(self, line: bytes) -> None:
        if self._in_trailer:
            self._at_end = not line
            self._trailers += len(line)
            if line and (self._trailers > MOST_TRAILERS or not TRAILER.fullmatch(line)):
                raise Malformed(400, "invalid trailer section, or one that exceeds the limit")
        elif self._after_chunk:
            if line:
                raise Malformed(400, "chunk data exceeds its chunk-size")
            self._after_chunk = False
        else:
            match = CHUNK.fullmatch(line)
            if match is None:
                raise Malformed(400, "invalid chunk-size line")
            self._missing = int(match[1], 16)
            self._in_trailer = not self._missing


def _line(buffer: bytearray) -> bytes | None:
    end = buffer.find(b"\r\n")
    if end < 0:
        if len(buffer) > LONGEST_LINE:
            raise Malformed(400, f"chunk-size or trailer line exceeds {LONGEST_LINE} bytes")
        return None
    line = bytes(buffer[:end])
    del buffer[: end + 2]
    return line
