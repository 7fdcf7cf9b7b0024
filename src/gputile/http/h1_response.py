"""Parses the heads of HTTP/1.1 responses strictly: `read_head` raises `Malformed` and must not guess. No sockets."""

import sys

import msgspec
from httptools import HttpResponseParser

from gputile.http.h1_head import Malformed, body_length, closes, combined, split_head

UNTIL_CLOSE = sys.maxsize  # bytes; the length of a body that ends with its connection
BODILESS = (204, 304)
VERSIONS = (b"HTTP/1.1 ", b"HTTP/1.0 ")


class ResponseHead(msgspec.Struct, frozen=True):
    """A response without its body."""

    status: int
    headers: dict[bytes, bytes]  # names in lower case; the values of a repeated name are joined by commas
    length: int | None  # of the body, in bytes; None if it is chunked
    closes: bool  # the connection closes after it


def read_head(head: bytes, method: str) -> ResponseHead:
    """Parse the head of the response to a request with this method. `head` ends with its empty line."""
    if not head.startswith(VERSIONS):
        raise Malformed(502, "malformed HTTP/1.1 status line")
    parser, fields = split_head(HttpResponseParser, head)
    status, headers, is_old = parser.get_status_code(), combined(fields), head.startswith(VERSIONS[1])
    length = body_length(headers, is_old=is_old, otherwise=UNTIL_CLOSE)
    if _has_no_body(status, method):
        length = 0
    is_last = length == UNTIL_CLOSE or closes(headers, is_old=is_old)
    return ResponseHead(status, headers, length, is_last)


def _has_no_body(status: int, method: str) -> bool:
    """True where the specification allows no body, whatever the headers claim."""
    return status in BODILESS or status < 200 or method == "HEAD" or (method == "CONNECT" and status < 300)
