"""Heads of HTTP/1.1 requests (RFC 9112), read strictly.

Room:  bytes in, what they say out. Whatever two readers could understand differently is refused, not guessed.
Door:  `read_head`; `check_begun` for a head that is not whole yet; `Malformed` where it is none.
"""

import re

import msgspec

from gputile.web.bodies import Malformed
from gputile.web.messages import parted

TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
TEXT = rb"[\t\x20-\x7e\x80-\xff]"  # of a value: no control characters, so no bare CR or LF either
IN_PATH = rb"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/\[\]]|%[0-9A-Fa-f]{2})"
AUTHORITY = rb"[A-Za-z0-9\-._~!$&'()*+,;=:%\[\]]"
TARGET = rb"(?:https?://%b++)?+/%b*+(?:\?[\x21\x22\x24-\x7e]*+)?+" % (AUTHORITY, IN_PATH)

WHOLE = re.compile(rb"%b++ %b HTTP/1\.[01](?:\r\n%b++:%b*+)*+" % (TOKEN, TARGET, TOKEN, TEXT))
"""All of a head. No part of it can match in two ways, so a hostile one costs one look at each byte."""

LINE = re.compile(rb"%b++ %b HTTP/([0-9])\.([0-9])" % (TOKEN, TARGET))
FIELD = re.compile(rb"%b++:%b*+" % (TOKEN, TEXT))
HOST = re.compile(rb"%b*+" % AUTHORITY)
BARE = re.compile(rb"(?<!\r)\n|\r[^\n]")
SPACE = b" \t"

SINGLE = (b"content-length", b"transfer-encoding", b"host")


class Head(msgspec.Struct, frozen=True):
    """A request without its body."""

    method: str
    path: str
    length: int | None  # of the body; None where it comes in chunks
    closes: bool  # after the answer
    asks_first: bool  # Expect: 100-continue
    query: str = ""
    fields: list[tuple[bytes, bytes]] = []
    knows_chunks: bool = True  # HTTP/1.0 does not

    @property
    def has_body(self) -> bool:
        return self.length != 0


def read_head(head: bytes) -> Head:
    """The request line and those headers that matter here."""
    if not WHOLE.fullmatch(head):
        raise _why(head)
    line, *lines = head.split(b"\r\n")
    method, target, version = line.split(b" ")
    found: dict[bytes, bytes] = {}
    fields: list[tuple[bytes, bytes]] = []
    for one in lines:
        name, _, value = one.partition(b":")
        name, value = name.lower(), value.strip(SPACE)
        fields.append((name, value))
        if name not in found:
            found[name] = value
        elif name in SINGLE:
            raise Malformed(400, f"the header {name.decode()} appears twice")
        else:
            found[name] += b"," + value
    is_old = version == b"HTTP/1.0"
    _check_host(found, is_old=is_old)
    path, query = parted(target.decode("ascii"))
    return Head(
        method=method.decode("ascii"),
        path=path,
        length=None if _is_chunked(found, is_old=is_old) else _length(found),
        closes=_closes(found.get(b"connection", b"").lower(), is_old=is_old),
        asks_first=found.get(b"expect", b"").lower() == b"100-continue",
        query=query,
        fields=fields,
        knows_chunks=not is_old,
    )


def check_begun(begun: bytes | bytearray) -> None:
    """A head whose end has not come. Whoever ends lines with LF alone would wait for our answer for ever."""
    if BARE.search(begun):
        raise Malformed(400, "lines end with CR LF; a CR or LF by itself is not accepted")


def _why(head: bytes) -> Malformed:
    """Which part of it is no HTTP/1.1; for people, after the fact."""
    line, *lines = head.split(b"\r\n")
    found = LINE.fullmatch(line)
    if found is None:
        return Malformed(400, "the request line is not one of HTTP/1.1")
    if found[1] != b"1" or found[2] not in b"01":
        return Malformed(505, "only HTTP/1.1 and HTTP/1.0 are understood")
    number = next((n for n, one in enumerate(lines, 1) if not FIELD.fullmatch(one)), 0)
    return Malformed(400, f"header line {number} is not valid: a token, a colon, and no control characters")


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
