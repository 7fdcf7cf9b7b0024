"""Heads of HTTP/1.1 answers.

Room:  bytes in, what they say out; nothing is guessed. No sockets.
Door:  `read_head`; `Malformed` where it is none.
"""

import re
import sys

import msgspec

from gputile.http.h1_body import Malformed

UNTIL_CLOSE = sys.maxsize  # bytes; the length of a body that ends with its connection
ONLY_ONCE = ("content-length", "transfer-encoding")
BODILESS = (204, 304)
FIELD = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]++:[\t\x20-\x7e\x80-\xff]*+")


class ResponseHead(msgspec.Struct, frozen=True):
    """An answer without its body."""

    status: int
    headers: dict[str, str]  # names in lower case; of two with one name the last
    length: int | None  # of the body, in bytes; None where it comes in chunks
    closes: bool  # no other answer comes after it


def read_head(head: bytes, method: str) -> ResponseHead:
    """What was answered to a request with this method."""
    line, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = line.partition(" ")
    code = rest[:3]
    if version not in ("HTTP/1.1", "HTTP/1.0") or not (code.isascii() and code.isdecimal()) or rest[3:4].strip():
        raise Malformed(502, "this is no HTTP/1.1 answer")
    status, headers = int(code), _headers(lines)
    if version == "HTTP/1.0" and "transfer-encoding" in headers:
        raise Malformed(502, "HTTP/1.0 knows no chunks")
    length = _length(headers, 0 if _has_no_body(status, method) else UNTIL_CLOSE)
    said = headers.get("connection", "").lower()
    closes = "close" in said or length == UNTIL_CLOSE or (version == "HTTP/1.0" and "keep-alive" not in said)
    return ResponseHead(status, headers, length, closes)


def _headers(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        if not FIELD.fullmatch(line):
            raise Malformed(502, "a header of the answer cannot be understood")
        name = name.lower()
        if name in ONLY_ONCE and name in found:
            raise Malformed(502, "the answer says twice how long it is")
        found[name] = value.strip(" \t")
    return found


def _has_no_body(status: int, method: str) -> bool:
    """Whatever the headers say."""
    return status in BODILESS or status < 200 or method == "HEAD" or (method == "CONNECT" and status < 300)


def _length(headers: dict[str, str], otherwise: int) -> int | None:
    """`otherwise`: 0 where there is no body, else what it is when the headers do not tell."""
    said, coding = headers.get("content-length"), headers.get("transfer-encoding")
    if coding is not None and (coding.lower() != "chunked" or said is not None):
        raise Malformed(502, "only a body of known length or in plain chunks is understood")
    if said is not None and not (said.isascii() and said.isdecimal() and len(said) < 16):
        raise Malformed(502, "Content-Length is no number")
    if otherwise == 0:
        return 0
    return None if coding else int(said) if said is not None else otherwise
