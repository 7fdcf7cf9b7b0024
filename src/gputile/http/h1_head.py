"""What the heads of requests and responses have in common: httptools splits them, and stricter rules of ours follow.

A message that two parsers could read differently (request smuggling) raises `Malformed`; this module must not guess.
"""

from typing import TypeVar

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser, HttpResponseParser

SPACE = b" \t"
SINGLE = (b"content-length", b"transfer-encoding", b"host")
Field = tuple[bytes, bytes]  # name in lower case, value
Parser = TypeVar("Parser", HttpRequestParser, HttpResponseParser)


class Malformed(Exception):
    """The received message violates the protocol; `status` is the HTTP status to respond with."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class HeaderFields:
    """Collects the header fields of one message from httptools."""

    __slots__ = ("fields",)

    def __init__(self) -> None:
        self.fields: list[Field] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name.lower(), value.strip(SPACE)))


def split_head(kind: type[Parser], head: bytes) -> tuple[Parser, list[Field]]:
    """Parse a head, which ends with its empty line. Each head has a new parser: nothing of the message before counts,
    and a request to upgrade the protocol is ignored."""
    collected = HeaderFields()
    parser = kind(collected)
    try:
        parser.feed_data(head)
    except HttpParserUpgrade:
        pass
    except HttpParserError as error:
        raise Malformed(400, "malformed head: the first line or a header field is invalid") from error
    if len(collected.fields) != head.count(b"\r\n") - 2:  # the start line and the empty line
        raise Malformed(400, "malformed head: a line is not one header field")
    return parser, collected.fields


def combined(fields: list[Field]) -> dict[bytes, bytes]:
    """The values by name; those of a repeated name are joined by commas."""
    headers = dict(fields)
    return headers if len(headers) == len(fields) else _joined(fields)


def _joined(fields: list[Field]) -> dict[bytes, bytes]:
    headers: dict[bytes, bytes] = {}
    for name, value in fields:
        if name not in headers:
            headers[name] = value
        elif name in SINGLE:
            raise Malformed(400, f"header {name.decode()}: appears more than once")
        else:
            headers[name] += b"," + value
    return headers


def body_length(headers: dict[bytes, bytes], *, is_old: bool, otherwise: int) -> int | None:
    """Bytes of the body; None if it is chunked, `otherwise` if no header says it. `is_old`: HTTP/1.0."""
    coding, length = headers.get(b"transfer-encoding"), headers.get(b"content-length")
    if coding is not None:
        if coding.lower() != b"chunked" or length is not None or is_old:
            raise Malformed(400, "unsupported Transfer-Encoding; use Content-Length, or `chunked` alone with HTTP/1.1")
        return None
    if length is None:
        return otherwise
    if not (length.isdigit() and len(length) < 16):
        raise Malformed(400, "invalid Content-Length")
    return int(length)


def closes(headers: dict[bytes, bytes], *, is_old: bool) -> bool:
    """Whether the connection closes after this message and its response."""
    connection = headers.get(b"connection")
    options = {option.strip(SPACE) for option in connection.lower().split(b",")} if connection else ()
    return b"close" in options or (is_old and b"keep-alive" not in options)
