"""Parses the heads of HTTP/1.1 requests (RFC 9112) strictly: the request line here, the header fields by httptools.

A request that two parsers could read differently (request smuggling) raises `Malformed`; this module must not guess.
"""

import re
from collections.abc import Sequence
from functools import lru_cache

import msgspec
from httptools import HttpRequestParser

from gputile.http.h1_head import Field, Malformed, body_length, closes, combined, split_head
from gputile.http.messages import split_target

TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
IN_PATH = rb"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/\[\]]|%[0-9A-Fa-f]{2})"
AUTHORITY = rb"[A-Za-z0-9\-._~!$&'()*+,;=:%\[\]]"
TARGET = rb"(?:https?://%b++)?+/%b*+(?:\?[\x21\x22\x24-\x7e]*+)?+" % (AUTHORITY, IN_PATH)

# Possessive quantifiers: nothing can match in two ways, so a hostile line costs one pass over its bytes.
LINE = re.compile(rb"%b++ %b HTTP/([0-9])\.([0-9])" % (TOKEN, TARGET))
HOST = re.compile(rb"%b*+" % AUTHORITY)
BARE = re.compile(rb"(?<!\r)\n|\r[^\n]")

SHORT = 512  # bytes of the longest head that is cached


class RequestHead(msgspec.Struct, frozen=True):
    """A request without its body."""

    method: str
    path: str
    length: int | None  # of the body; None if it is chunked
    closes: bool  # the connection closes after the response
    asks_first: bool  # Expect: 100-continue
    query: str = ""
    fields: Sequence[Field] = ()
    knows_chunks: bool = True  # False for HTTP/1.0

    @property
    def has_body(self) -> bool:
        return self.length != 0


class RequestLine(msgspec.Struct, frozen=True):
    """The request line: method, target and version."""

    method: str
    path: str
    query: str
    is_old: bool  # HTTP/1.0


def read_head(head: bytes) -> RequestHead:
    """Parse the request line and the header fields. `head` ends with its empty line."""
    return _cached_head(head) if len(head) <= SHORT else _read_head(head)


def _read_head(head: bytes) -> RequestHead:
    line = _read_line(head[: head.index(b"\r\n")])
    _, fields = split_head(HttpRequestParser, head)
    headers = combined(fields)
    _check_host(headers, is_old=line.is_old)
    return RequestHead(
        line.method,
        line.path,
        body_length(headers, is_old=line.is_old, otherwise=0),
        closes(headers, is_old=line.is_old),
        headers.get(b"expect", b"").lower() == b"100-continue",
        line.query,
        tuple(fields),
        not line.is_old,
    )


_cached_head = lru_cache(256)(_read_head)
"""A caller's heads differ in little more than their Content-Length, so most are one of the last 256."""


def _read_line(line: bytes) -> RequestLine:
    match = LINE.fullmatch(line)
    if match is None:
        raise Malformed(400, "malformed HTTP/1.1 request line")
    if match[1] != b"1" or match[2] not in b"01":
        raise Malformed(505, "unsupported HTTP version; use HTTP/1.1 or HTTP/1.0")
    method, target, _ = line.decode("ascii").split(" ")
    return RequestLine(method, *split_target(target), match[2] == b"0")


def check_begun(begun: bytes | bytearray) -> None:
    """Check an incomplete head. A client that ends its lines with a bare LF would wait for a response for ever."""
    if BARE.search(begun):
        raise Malformed(400, "bare CR or LF in the head; lines must end with CR LF")


def _check_host(headers: dict[bytes, bytes], *, is_old: bool) -> None:
    host = headers.get(b"host")
    if host is None and not is_old:
        raise Malformed(400, "missing Host header; HTTP/1.1 requires it")
    if host is not None and not HOST.fullmatch(host):
        raise Malformed(400, "invalid Host header")
