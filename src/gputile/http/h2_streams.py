"""One question over HTTP/2, from its headers to the last byte of its answer.

Room:  what RFC 9113, section 8, asks of a request, and a body as it comes.
Door:  `read_fields` checks headers, `H2Stream.take` collects a body, `answer_fields` writes the headers of an answer.
"""

import asyncio
import re
from functools import lru_cache

import msgspec

from gputile.http.h2_frames import H2ErrorCode, H2StreamError
from gputile.http.hpack import Field, written
from gputile.http.messages import parted

NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")  # a token in lower case (section 8.2.1)
VALUE = re.compile(rb"(?:[^\0\r\n\t ](?:[^\0\r\n]*[^\0\r\n\t ])?)?")  # no end of a line, no space at its ends
OF_CONNECTIONS = frozenset({b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"})
PSEUDO = frozenset({b":method", b":scheme", b":path", b":authority"})
LONGEST_NUMBER = 15  # digits of a length


class H2RequestHead(msgspec.Struct, frozen=True):
    """A request without its body."""

    method: str
    path: str
    length: int | None  # of the body, where it was said
    query: str = ""
    fields: list[Field] = []


def read_fields(fields: list[Field]) -> H2RequestHead:
    """Those headers that matter here; whatever is not as it should be is refused, not guessed."""
    special: dict[bytes, bytes] = {}
    length: int | None = None
    is_special = True
    for name, value in fields:
        if name[:1] == b":":
            if not is_special or name not in PSEUDO or name in special or not VALUE.fullmatch(value):
                raise _malformed(f"{name!r} is out of place")
            special[name] = value
        else:
            is_special = False
            check_plain(name, value)
            if name == b"content-length":
                if length is not None:
                    raise _malformed("two lengths")
                length = _length(value)
    path = special.get(b":path", b"")
    if not (special.get(b":method") and special.get(b":scheme") and path[:1] == b"/"):
        raise _malformed("no method, scheme or path")
    where, query = parted(path.decode("latin-1"))
    return H2RequestHead(special[b":method"].decode("latin-1"), where, length, query, fields)


def check_plain(name: bytes, value: bytes) -> None:
    """A header that is none of HTTP/2's own, in front of a body or behind it."""
    if not NAME.fullmatch(name) or not VALUE.fullmatch(value):
        raise _malformed(f"{name!r} is no header")
    if name in OF_CONNECTIONS or (name == b"te" and value != b"trailers"):
        raise _malformed(f"{name!r} has no meaning in HTTP/2")


def _length(said: bytes) -> int:
    if not (said.isdigit() and len(said) <= LONGEST_NUMBER):
        raise _malformed("content-length is no number")
    return int(said)


def _malformed(why: str) -> H2StreamError:
    return H2StreamError(H2ErrorCode.PROTOCOL_ERROR, why)


class H2Stream:
    """
    asking --whole--> working --answered--> answering --last byte--> gone
       |                 |                      |                     ^
       +-----------------+--reset by either-----+---------------------+

    While it answers piece by piece it is open: an empty `rest` means that we have nothing to say, not that all is said.
    """

    __slots__ = (
        "answer",
        "body",
        "head",
        "is_open",
        "is_whole",
        "kept",
        "number",
        "pouring",
        "rest",
        "since",
        "size",
        "taken",
        "window",
    )

    def __init__(self, number: int, head: H2RequestHead, window: int, since: float) -> None:
        self.number, self.head = number, head
        self.window = window  # bytes of the answer that the other side is ready to take
        self.since = since  # when the last thing happened that counts
        self.body, self.size = bytearray(), 0
        self.kept = 0  # bytes of it that count as not whole
        self.is_whole = False  # the question
        self.answer = b""  # what is being sent
        self.rest: memoryview | None = None  # of it, once there is one: what has not gone
        self.is_open = False  # more of the answer may come
        self.pouring: asyncio.Task[None] | None = None  # who brings it
        self.taken: asyncio.Future[None] | None = None  # what that one waits for: the other side has taken all

    @property
    def is_working(self) -> bool:
        return self.is_whole and self.rest is None

    @property
    def waits_for_us(self) -> bool:
        return self.is_working or (self.is_open and not self.rest)

    async def all_taken(self) -> None:
        """Until the other side has made room for all that there is to say."""
        while self.rest:
            self.taken = asyncio.get_running_loop().create_future()
            await self.taken

    def wake(self) -> None:
        if self.taken is not None and not self.taken.done():
            self.taken.set_result(None)

    def take(self, data: bytearray, limit: int) -> None:
        """A piece of the body. What goes beyond the limit is counted only."""
        self.size += len(data)
        if self.head.length is not None and self.size > self.head.length:
            raise _malformed("the body is longer than it says")
        if self.size > limit:
            self.body.clear()
        else:
            self.body += data

    def end(self) -> None:
        """The question is whole."""
        if self.head.length not in (None, self.size):
            raise _malformed("the body is shorter than it says")
        self.is_whole = True


def answer_fields(status: int, content_type: str, length: int) -> bytes:
    return _constant_fields(status, content_type) + written(b"content-length", b"%d" % length)


def stream_fields(status: int, content_type: str) -> bytes:
    """Of an answer that does not say how long it is."""
    return _constant_fields(status, content_type)


@lru_cache(64)
def _constant_fields(status: int, content_type: str) -> bytes:
    return written(b":status", b"%d" % status) + written(b"content-type", content_type.encode())
