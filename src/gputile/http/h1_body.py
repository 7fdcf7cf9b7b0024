"""Bodies of HTTP/1.1 messages: of a known length, or in chunks.

Room:  bytes that come in pieces of any size, put together. The same for what we are asked and what we are answered.
Door:  `Body.take`, until it says that it is whole; `Malformed` where it can never be. Then `content`; or, for whoever
       wants the pieces as they come, `pieces` after each `take`.
"""

import re

LONGEST_LINE = 4096  # bytes, of a chunk's head
MOST_TRAILERS = 65536  # bytes, of all that comes behind the last chunk
CHUNK = re.compile(rb"([0-9A-Fa-f]{1,12})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?")
TRAILER = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*")


class Malformed(Exception):
    """What came is nothing that we understand."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Body:
    """Collects a body as it comes; what goes beyond the limit is counted and dropped."""

    def __init__(self, length: int | None, limit: int) -> None:
        """`length`: in bytes, None where it comes in chunks. `limit`: how much of it is kept at most."""
        self._limit, self._chunked = limit, length is None
        self._missing = length or 0
        self._found = bytearray()
        self._size = 0
        self._at_end = not self._chunked  # no further chunk comes
        self._after_chunk = self._in_trailer = False
        self._trailers = 0  # bytes

    @property
    def is_too_large(self) -> bool:
        return self._size > self._limit

    def content(self) -> bytes:
        return b"" if self.is_too_large else bytes(self._found)

    @property
    def held(self) -> int:
        """Bytes that are here and were not asked for yet."""
        return len(self._found)

    def pieces(self) -> bytes:
        """What has come since this was last asked."""
        found = bytes(self._found)
        self._found.clear()
        return found

    def take(self, buffer: bytearray) -> bool:
        """Take what is there; whether the body is whole."""
        while True:
            if self._missing:
                part = buffer[: self._missing]
                del buffer[: len(part)]
                self._missing -= len(part)
                self._size += len(part)
                if self.is_too_large:
                    self._found.clear()
                else:
                    self._found += part
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
                raise Malformed(400, "what comes behind the last chunk is no header, or too much")
        elif self._after_chunk:
            if line:
                raise Malformed(400, "a chunk is longer than it says")
            self._after_chunk = False
        else:
            found = CHUNK.fullmatch(line)
            if found is None:
                raise Malformed(400, "a chunk does not say how long it is")
            self._missing = int(found[1], 16)
            self._in_trailer = not self._missing


def _line(buffer: bytearray) -> bytes | None:
    end = buffer.find(b"\r\n")
    if end < 0:
        if len(buffer) > LONGEST_LINE:
            raise Malformed(400, "a line is too long")
        return None
    line = bytes(buffer[:end])
    del buffer[: end + 2]
    return line
