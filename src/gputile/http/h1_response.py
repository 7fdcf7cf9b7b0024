"""Parses the heads of HTTP/1.1 responses strictly: `read_head` raises `Malformed` and must not guess. No sockets."""

import re
import sys

import msgspec

from gputile.http.h1_body import Malformed

UNTIL_CLOSE = sys.maxsize  # bytes; the length of a body that ends with its connection
ONLY_ONCE = ("content-length", "transfer-encoding")
BODILESS = (204, 304)
FIELD = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]++:[\t\x20-\x7e\x80-\xff]*+")


class ResponseHead(msgspec.Struct, frozen=True):
    """A response without its body."""

    status: int
    headers: dict[str, str]  # names in lower case; the last value of a repeated name
    length: int | None  # of the body, in bytes; None if it is chunked
    closes: bool  # the connection closes after it


def read_head(head: bytes, method: str) -> ResponseHead:
    """Parse the head of the response to a request with this method."""
    line, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = line.partition(" ")
    code = rest[:3]
    if version not in ("HTTP/1.1", "HTTP/1.0") or not (code.isascii() and code.isdecimal()) or rest[3:4].strip():
        raise Malformed(502, "malformed HTTP/1.1 status line")
    status, headers = int(code), _headers(lines)
    if version == "HTTP/1.0" and "transfer-encoding" in headers:
        raise Malformed(502, "Transfer-Encoding in an HTTP/1.0 response")
    length = _length(headers, 0 if _has_no_body(status, method) else UNTIL_CLOSE)
    options = headers.get("connection", "").lower()
    closes = "close" in options or length == UNTIL_CLOSE or (version == "HTTP/1.0" and "keep-alive" not in options)
    return ResponseHead(status, headers, length, closes)


def _headers(lines: list[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        if not FIELD.fullmatch(line):
            raise Malformed(502, "malformed header field in the response")
        name = name.lower()
        if name in ONLY_ONCE and name in headers:
            raise Malformed(502, f"response header {name}: appears more than once")
        headers[name] = value.strip(" \t")
    return headers


def _has_no_body(status: int, method: str) -> bool:
    """True where the specification allows no body, whatever the headers claim."""
    return status in BODILESS or status < 200 or method == "HEAD" or (method == "CONNECT" and status < 300)


def _length(headers: dict[str, str], otherwise: int) -> int | None:
    """`otherwise`: 0 if the response has no body, else the length when the headers have none."""
    length, coding = headers.get("content-length"), headers.get("transfer-encoding")
    if coding is not None and (coding.lower() != "chunked" or length is not None):
        raise Malformed(502, "unsupported Transfer-Encoding in the response")
    if length is not None and not (length.isascii() and length.isdecimal() and len(length) < 16):
        raise Malformed(502, "invalid Content-Length in the response")
    if otherwise == 0:
        return 0
    return None if coding else int(length) if length is not None else otherwise
