"""One HTTP/2 stream: a request from its headers to the last byte of its response (RFC 9113, section 8).

`read_fields` validates request headers, `H2Stream.take` collects a body, `answer_fields` encodes response headers. This
module must not send or read frames.
"""

import asyncio
import re
from functools import lru_cache

import msgspec

from gputile.http.h2_frames import H2ErrorCode, H2StreamError
from gputile.http.hpack import Field, encode_field
from gputile.http.messages import split_target

NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")  # a token in lower case (section 8.2.1)
VALUE = re.compile(rb"(?:[^\0\r\n\t ](?:[^\0\r\n]*[^\0\r\n\t ])?)?")  # no line break, no space at either end
CONNECTION_SPECIFIC = frozenset({b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"})
PSEUDO = frozenset({b":method", b":scheme", b":path", b":authority"})
LONGEST_NUMBER = 15  # digits of a length


class H2RequestHead(msgspec.Struct, frozen=True):
    """A request without its body."""

    method: str
    path: str
    length: int | None  # of the body; None without content-length
    query: str = ""
    fields: list[Field] = []


def read_fields(fields: list[Field]) -> H2RequestHead:
    """Validate the headers of a request strictly: a malformed request is rejected, never guessed."""
    pseudo: dict[bytes, bytes] = {}
    length: int | None = None
    pseudo_allowed = True  # pseudo-header fields come before all others
    for name, value in fields:
        if name[:1] == b":":
            if not pseudo_allowed or name not in PSEUDO or name in pseudo or not VALUE.fullmatch(value):
                raise _malformed(f"invalid pseudo-header field {name!r}")
            pseudo[name] = value
        else:
            pseudo_allowed = False
            check_plain(name, value)
            if name == b"content-length":
                if length is not None:
                    raise _malformed("content-length appears more than once")
                length = _length(value)
    path = pseudo.get(b":path", b"")
    if not (pseudo.get(b":method") and pseudo.get(b":scheme") and path[:1] == b"/"):
        raise _malformed("missing or invalid :method, :scheme or :path")
    bare_path, query = split_target(path.decode("latin-1"))
    return H2RequestHead(pseudo[b":method"].decode("latin-1"), bare_path, length, query, fields)


def check_plain(name: bytes, value: bytes) -> None:
    """Validate a header or trailer field that is no pseudo-header field."""
    if not NAME.fullmatch(name) or not VALUE.fullmatch(value):
        raise _malformed(f"malformed header field {name!r}")
    if name in CONNECTION_SPECIFIC or (name == b"te" and value != b"trailers"):
        raise _malformed(f"connection-specific header field {name!r}")


def _length(value: bytes) -> int:
    if not (value.isdigit() and len(value) <= LONGEST_NUMBER):
        raise _malformed("invalid content-length")
    return int(value)


def _malformed(reason: str) -> H2StreamError:
    return H2StreamError(H2ErrorCode.PROTOCOL_ERROR, reason)


class H2Stream:
    """One request and its response.

    receiving --request complete--> working --response ready--> sending --last byte--> closed
        |                              |                           |                      ^
        +------------------------------+---reset by either side----+----------------------+

    While the response is streamed, the stream is open: an empty `rest` means nothing to send now, not the end.
    """

    __slots__ = (
        "answer",
        "body",
        "head",
        "is_open",
        "is_whole",
        "kept",
        "number",
        "rest",
        "sent",
        "since",
        "size",
        "streaming",
        "window",
    )

    def __init__(self, number: int, head: H2RequestHead, window: int, since: float) -> None:
        self.number, self.head = number, head
        self.window = window  # bytes of the response that the peer accepts now
        self.since = since  # time of the last progress
        self.body, self.size = bytearray(), 0
        self.kept = 0  # bytes of the body that count as incomplete
        self.is_whole = False  # the request is complete
        self.answer = b""  # the response, or the piece of it, that is being sent
        self.rest: memoryview | None = None  # its unsent bytes; None before there is a response
        self.is_open = False  # more of the response may follow
        self.streaming: asyncio.Task[None] | None = None  # the task that produces the pieces
        self.sent: asyncio.Future[None] | None = None  # what that task waits for: the piece was sent

    @property
    def is_working(self) -> bool:
        return self.is_whole and self.rest is None

    @property
    def waits_for_us(self) -> bool:
        return self.is_working or (self.is_open and not self.rest)

    async def all_taken(self) -> None:
        """Wait until the peer's window allowed to send all of `rest`."""
        while self.rest:
            self.sent = asyncio.get_running_loop().create_future()
            await self.sent

    def wake(self) -> None:
        if self.sent is not None and not self.sent.done():
            self.sent.set_result(None)

    def take(self, data: bytearray, limit: int) -> None:
        """Add a piece of the body. A body beyond the limit is only counted."""
        self.size += len(data)
        if self.head.length is not None and self.size > self.head.length:
            raise _malformed("body exceeds content-length")
        if self.size > limit:
            self.body.clear()
        else:
            self.body += data

    def end(self) -> None:
        """The request is complete."""
        if self.head.length not in (None, self.size):
            raise _malformed("body is shorter than content-length")
        self.is_whole = True


def answer_fields(status: int, content_type: str, length: int) -> bytes:
    """The headers of a response of known length."""
    return _constant_fields(status, content_type) + encode_field(b"content-length", b"%d" % length)


def stream_fields(status: int, content_type: str) -> bytes:
    """The headers of a response of unknown length."""
    return _constant_fields(status, content_type)


@lru_cache(64)
def _constant_fields(status: int, content_type: str) -> bytes:
    return encode_field(b":status", b"%d" % status) + encode_field(b"content-type", content_type.encode())
