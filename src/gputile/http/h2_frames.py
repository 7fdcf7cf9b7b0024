"""Encodes and decodes the frames of HTTP/2 (RFC 9113, sections 4, 6 and 7). It keeps no state.

`H2ConnectionError` ends a connection, `H2StreamError` one stream.
"""

from collections.abc import Iterator
from enum import IntEnum
from struct import Struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD = Struct(">BHBBL")  # the length in two parts, type, flags, stream
SETTING = Struct(">HL")
WORD = Struct(">L")

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x01
END_HEADERS, PADDED, WITH_PRIORITY = 0x04, 0x08, 0x20
ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 2, 3, 4, 5, 6

FIRST_WINDOW = 65535  # bytes: the initial flow-control window
SMALLEST_FRAME = 16384  # bytes: the initial SETTINGS_MAX_FRAME_SIZE, which every endpoint accepts
LARGEST_FRAME = 2**24 - 1  # bytes
LARGEST = 2**31 - 1  # flow-control window, and stream identifier


class H2ErrorCode(IntEnum):
    """The error codes of RST_STREAM and GOAWAY (section 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class H2ConnectionError(Exception):
    """A connection error: the whole connection ends (section 5.4.1)."""

    def __init__(self, code: H2ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class H2StreamError(Exception):
    """A stream error: one stream ends, the others continue (section 5.4.2)."""

    def __init__(self, code: H2ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


# ---- reading --------------------------------------------------------------------------------------------------------


def unpadded(payload: bytearray) -> bytearray:
    if not payload or payload[0] >= len(payload):
        raise H2ConnectionError(H2ErrorCode.PROTOCOL_ERROR, "padding exceeds the frame payload")
    return payload[1 : len(payload) - payload[0]]


def settings_in(payload: bytearray) -> Iterator[tuple[int, int]]:
    """The peer's settings, each checked (section 6.5.2); unknown settings are ignored."""
    if len(payload) % SETTING.size:
        raise H2ConnectionError(H2ErrorCode.FRAME_SIZE_ERROR, "SETTINGS length is not a multiple of 6")
    for name, value in SETTING.iter_unpack(payload):
        if name == INITIAL_WINDOW_SIZE and value > LARGEST:
            raise H2ConnectionError(H2ErrorCode.FLOW_CONTROL_ERROR, "flow-control window exceeds 2^31-1")
        if name == MAX_FRAME_SIZE and not SMALLEST_FRAME <= value <= LARGEST_FRAME:
            raise H2ConnectionError(H2ErrorCode.PROTOCOL_ERROR, "SETTINGS_MAX_FRAME_SIZE out of range")
        if name == ENABLE_PUSH and value > 1:
            raise H2ConnectionError(H2ErrorCode.PROTOCOL_ERROR, "SETTINGS_ENABLE_PUSH must be 0 or 1")
        yield name, value


def word_in(payload: bytearray) -> int:
    if len(payload) != WORD.size:
        raise H2ConnectionError(H2ErrorCode.FRAME_SIZE_ERROR, "frame payload must be 4 bytes long")
    return int(WORD.unpack(payload)[0])


# ---- writing --------------------------------------------------------------------------------------------------------


def head(kind: int, flags: int, number: int, length: int) -> bytes:
    return HEAD.pack(length >> 16, length & 0xFFFF, kind, flags, number)


def frame(kind: int, flags: int = 0, number: int = 0, payload: bytes = b"") -> bytes:
    return head(kind, flags, number, len(payload)) + payload


def settings(values: dict[int, int]) -> bytes:
    return frame(SETTINGS, payload=b"".join(SETTING.pack(name, value) for name, value in values.items()))


def window_update(number: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, number, WORD.pack(increment))


def reset(number: int, code: H2ErrorCode) -> bytes:
    return frame(RST_STREAM, 0, number, WORD.pack(code))


def goaway(last: int, code: H2ErrorCode, reason: str = "") -> bytes:
    """`last`: the highest stream that was processed. A client may retry the streams above it (section 6.8)."""
    return frame(GOAWAY, payload=WORD.pack(last) + WORD.pack(code) + reason.encode())
