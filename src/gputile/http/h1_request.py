"""Heads of HTTP/1.1 requests (RFC 9112), read strictly.

Room:  bytes in, what they say out. Whatever two readers could understand differently is refused, not guessed.
Door:  `read_head`; `check_begun` for a head that is not whole yet; `Malformed` where it is none.
"""

import re
from functools import lru_cache

import msgspec

from gputile.http.h1_body import Malformed
from gputile.http.messages import parted

TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
TEXT = rb"[\t\x20-\x7e\x80-\xff]"  # of a value: no control characters, so no bare CR or LF either
IN_PATH = rb"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/\[\]]|%[0-9A-Fa-f]{2})"
AUTHORITY = rb"[A-Za-z0-9\-._~!$&'()*+,;=:%\[\]]"
TARGET = rb"(?:https?://%b++)?+/%b*+(?:\?[\x21\x22\x24-\x7e]*+)?+" % (AUTHORITY, IN_PATH)

# No part of these can match in two ways, so a hostile line costs one look at each byte.
LINE = re.compile(rb"%b++ %b HTTP/([0-9])\.([0-9])" % (TOKEN, TARGET))
FIELD = re.compile(rb"%b++:%b*+" % (TOKEN, TEXT))
HOST = re.compile(rb"%b*+" % AUTHORITY)
BARE = re.compile(rb"(?<!\r)\n|\r[^\n]")
SPACE = b" \t"

SINGLE = (b"content-length", b"transfer-encoding", b"host")
SHORT = 256  # bytes of a line that is remembered
Field = tuple[bytes, bytes]  # its name in lower case


class RequestHead(msgspec.Struct, frozen=True):
    """A request without its body."""

    method: str
    path: str
    length: int | None  # of the body; None where it comes in chunks
    closes: bool  # after the answer
    asks_first: bool  # Expect: 100-continue
    query: str = ""
    fields: list[Field] = []
    knows_chunks: bool = True  # HTTP/1.0 does not

    @property
    def has_body(self) -> bool:
        return self.length != 0


class RequestLine(msgspec.Struct, frozen=True):
    """The first line of a request."""

    method: str
    path: str
    query: str
    is_old: bool  # HTTP/1.0


def read_head(head: bytes) -> RequestHead:
    """The request line and those headers that matter here."""
    first, *rest = head.split(b"\r\n")
    line = _remembered_line(first) if len(first) <= SHORT else _read_line(first)
    found: dict[bytes, bytes] = {}
    fields: list[Field] = []
    for one in rest:
        field = _remembered_field(one) if len(one) <= SHORT else _read_field(one)
        fields.append(field)
        name, value = field
        if name not in found:
            found[name] = value
        elif name in SINGLE:
            raise Malformed(400, f"the header {name.decode()} appears twice")
        else:
            found[name] += b"," + value
    _check_host(found, is_old=line.is_old)
    return RequestHead(
        line.method,
        line.path,
        None if _is_chunked(found, is_old=line.is_old) else _length(found),
        _closes(found.get(b"connection", b"").lower(), is_old=line.is_old),
        found.get(b"expect", b"").lower() == b"100-continue",
        line.query,
        fields,
        not line.is_old,
    )


def _read_line(line: bytes) -> RequestLine:
    found = LINE.fullmatch(line)
    if found is None:
        raise Malformed(400, "the request line is not one of HTTP/1.1")
    if found[1] != b"1" or found[2] not in b"01":
        raise Malformed(505, "only HTTP/1.1 and HTTP/1.0 are understood")
    method, target, _ = line.decode("ascii").split(" ")
    return RequestLine(method, *parted(target), found[2] == b"0")


def _read_field(line: bytes) -> Field:
    if not FIELD.fullmatch(line):
        raise Malformed(400, "a header is not valid: a token, a colon, and a value without control characters")
    name, _, value = line.partition(b":")
    return name.lower(), value.strip(SPACE)


_remembered_line, _remembered_field = lru_cache(256)(_read_line), lru_cache(512)(_read_field)
"""The same caller sends the same lines again and again; reading them costs more than all else that HTTP is."""


def check_begun(begun: bytes | bytearray) -> None:
    """A head whose end has not come. Whoever ends lines with LF alone would wait for our answer for ever."""
    if BARE.search(begun):
        raise Malformed(400, "lines end with CR LF; a CR or LF by itself is not accepted")


def _check_host(found: dict[bytes, bytes], *, is_old: bool) -> None:
    host = found.get(b"host")
    if host is None and not is_old:
        raise Malformed(400, "HTTP/1.1 needs the header Host")
    if host is not None and not HOST.fullmatch(host):
        raise Malformed(400, "the header Host is no host")


def _length(found: dict[bytes, bytes]) -> int:
    said = found.get(b"content-length", b"0")
    if not (said.isdigit() and len(said) < 16):
        raise Malformed(400, "Content-Length is no number")
    return int(said)


def _is_chunked(found: dict[bytes, bytes], *, is_old: bool) -> bool:
    said = found.get(b"transfer-encoding")
    if said is None:
        return False
    if said.lower() != b"chunked" or b"content-length" in found or is_old:
        raise Malformed(400, "only a body of known length or in plain chunks of HTTP/1.1 is understood")
    return True


def _closes(connection: bytes, *, is_old: bool) -> bool:
    said = {token.strip(SPACE) for token in connection.split(b",")} if connection else ()
    return b"close" in said or (is_old and b"keep-alive" not in said)
