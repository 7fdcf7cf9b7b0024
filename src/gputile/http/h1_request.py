"""Parses the heads of HTTP/1.1 requests (RFC 9112) strictly.

A request that two parsers could read differently (request smuggling) raises `Malformed`; this module must not guess.
"""

import re
from functools import lru_cache

import msgspec

from gputile.http.h1_body import Malformed
from gputile.http.messages import split_target

TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
TEXT = rb"[\t\x20-\x7e\x80-\xff]"  # of a field value: no control characters, so no bare CR or LF either
IN_PATH = rb"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/\[\]]|%[0-9A-Fa-f]{2})"
AUTHORITY = rb"[A-Za-z0-9\-._~!$&'()*+,;=:%\[\]]"
TARGET = rb"(?:https?://%b++)?+/%b*+(?:\?[\x21\x22\x24-\x7e]*+)?+" % (AUTHORITY, IN_PATH)

# Possessive quantifiers: nothing can match in two ways, so a hostile line costs one pass over its bytes.
LINE = re.compile(rb"%b++ %b HTTP/([0-9])\.([0-9])" % (TOKEN, TARGET))
FIELD = re.compile(rb"%b++:%b*+" % (TOKEN, TEXT))
HOST = re.compile(rb"%b*+" % AUTHORITY)
BARE = re.compile(rb"(?<!\r)\n|\r[^\n]")
SPACE = b" \t"

SINGLE = (b"content-length", b"transfer-encoding", b"host")
SHORT = 256  # bytes of the longest line that is cached
Field = tuple[bytes, bytes]  # name in lower case, value


class RequestHead(msgspec.Struct, frozen=True):
    """A request without its body."""

    method: str
    path: str
    length: int | None  # of the body; None if it is chunked
    closes: bool  # the connection closes after the response
    asks_first: bool  # Expect: 100-continue
    query: str = ""
    fields: list[Field] = []
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
    """Parse the request line and the header fields."""
    first, *rest = head.split(b"\r\n")
    line = _cached_line(first) if len(first) <= SHORT else _read_line(first)
    headers: dict[bytes, bytes] = {}
    fields: list[Field] = []
    for text in rest:
        field = _cached_field(text) if len(text) <= SHORT else _read_field(text)
        fields.append(field)
        name, value = field
        if name not in headers:
            headers[name] = value
        elif name in SINGLE:
            raise Malformed(400, f"header {name.decode()}: appears more than once")
        else:
            headers[name] += b"," + value
    _check_host(headers, is_old=line.is_old)
    return RequestHead(
        line.method,
        line.path,
        None if _is_chunked(headers, is_old=line.is_old) else _length(headers),
        _closes(headers.get(b"connection", b"").lower(), is_old=line.is_old),
        headers.get(b"expect", b"").lower() == b"100-continue",
        line.query,
        fields,
        not line.is_old,
    )


def _read_line(line: bytes) -> RequestLine:
    match = LINE.fullmatch(line)
    if match is None:
        raise Malformed(400, "malformed HTTP/1.1 request line")
    if match[1] != b"1" or match[2] not in b"01":
        raise Malformed(505, "unsupported HTTP version; use HTTP/1.1 or HTTP/1.0")
    method, target, _ = line.decode("ascii").split(" ")
    return RequestLine(method, *split_target(target), match[2] == b"0")


def _read_field(line: bytes) -> Field:
    if not FIELD.fullmatch(line):
        raise Malformed(400, "malformed header field; expected a token, a colon, a value without control characters")
    name, _, value = line.partition(b":")
    return name.lower(), value.strip(SPACE)


_cached_line, _cached_field = lru_cache(256)(_read_line), lru_cache(512)(_read_field)
"""The same caller sends the same lines again and again; parsing them costs more than the rest of HTTP."""


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


def _length(headers: dict[bytes, bytes]) -> int:
    length = headers.get(b"content-length", b"0")
    if not (length.isdigit() and len(length) < 16):
        raise Malformed(400, "invalid Content-Length")
    return int(length)


def _is_chunked(headers: dict[bytes, bytes], *, is_old: bool) -> bool:
    coding = headers.get(b"transfer-encoding")
    if coding is None:
        return False
    if coding.lower() != b"chunked" or b"content-length" in headers or is_old:
        raise Malformed(400, "unsupported Transfer-Encoding; use Content-Length, or `chunked` alone with HTTP/1.1")
    return True


def _closes(connection: bytes, *, is_old: bool) -> bool:
    options = {token.strip(SPACE) for token in connection.split(b",")} if connection else ()
    return b"close" in options or (is_old and b"keep-alive" not in options)
