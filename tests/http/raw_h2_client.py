"""The client side of an HTTP/2 connection without a socket, with another implementation's encoder and decoder."""

from hpack import Decoder, Encoder
from hyperframe.frame import DataFrame, Frame, GoAwayFrame, HeadersFrame, RstStreamFrame

from gputile.http import h2_frames as frames
from gputile.http.h2_frames import END_HEADERS, END_STREAM, H2ErrorCode, frame
from gputile.http.h2_server import H2Connection
from gputile.http.server import Listener
from tests.http.wire import Echo, Wire, receive

Fields = list[tuple[bytes, bytes]]


class RawH2Client:
    """An HTTP/2 client that sends raw frames; another implementation decodes the received ones."""

    def __init__(self, listener: Listener | None = None, *, known: bool = False, settings: bytes = b"") -> None:
        self.listener = listener or Echo()
        self.wire = Wire(known=known)
        self.connection = H2Connection(self.listener)
        self.connection.connection_made(self.wire)
        self._encoder, self._decoder = Encoder(), Decoder()
        self._decoder.max_allowed_table_size = 0
        self._read, self.received = 0, list[Frame]()
        self._begin = frames.PREFACE + frame(frames.SETTINGS, payload=settings)

    def send(self, *parts: bytes) -> "RawH2Client":
        receive(self.connection, self.begin() + b"".join(parts))
        return self

    def begin(self) -> bytes:
        """The connection preface and SETTINGS, once."""
        preface, self._begin = self._begin, b""
        return preface

    def block(self, path: str, fields: Fields) -> bytes:
        begin = [(b":method", b"POST"), (b":scheme", b"https"), (b":path", path.encode()), (b":authority", b"x")]
        return bytes(self._encoder.encode([*begin, *fields]))

    def raw(self, fields: Fields) -> bytes:
        return bytes(self._encoder.encode(fields))

    def post(self, number: int, body: bytes = b"", path: str = "/a", fields: Fields | None = None) -> bytes:
        if fields is None:
            fields = [(b"content-length", b"%d" % len(body))]
        begin = frame(frames.HEADERS, END_HEADERS | (0 if body else END_STREAM), number, self.block(path, fields))
        pieces = [body[start : start + 65536] for start in range(0, len(body), 65536)]
        ends = [0] * (len(pieces) - 1) + [END_STREAM]
        return begin + b"".join(
            frame(frames.DATA, end, number, piece) for end, piece in zip(ends, pieces, strict=False)
        )

    def headed(self, number: int = 1, length: bytes = b"5") -> bytes:
        """The HEADERS of a request whose body follows."""
        return frame(frames.HEADERS, END_HEADERS, number, self.block("/a", [(b"content-length", length)]))

    # ---- received frames --------------------------------------------------------------------------------------------

    def frames(self) -> list[Frame]:
        """All frames received so far."""
        while self._read < len(self.wire.sent):
            parsed, length = Frame.parse_frame_header(memoryview(self.wire.sent[self._read : self._read + 9]))
            self._read += 9
            parsed.parse_body(memoryview(self.wire.sent[self._read : self._read + length]))
            self._read += length
            self.received.append(parsed)
        return self.received

    def answers(self) -> dict[int, bytes]:
        """The bodies of the complete responses, by stream."""
        bodies: dict[int, bytes] = {}
        for sent in self.frames():
            if isinstance(sent, DataFrame):
                bodies[sent.stream_id] = bodies.get(sent.stream_id, b"") + sent.data
        return {number: bodies.get(number, b"") for number in self.ended()}

    def ended(self) -> list[int]:
        return [sent.stream_id for sent in self.frames() if "END_STREAM" in sent.flags]

    def heads(self) -> list[dict[bytes, bytes]]:
        """The headers of all responses; call it once, because the decoder has state."""
        blocks = [sent.data for sent in self.frames() if isinstance(sent, HeadersFrame)]
        return [dict(self._decoder.decode(block, raw=True)) for block in blocks]

    def resets(self) -> dict[int, H2ErrorCode]:
        return {
            sent.stream_id: H2ErrorCode(sent.error_code) for sent in self.frames() if isinstance(sent, RstStreamFrame)
        }

    def goaway(self) -> tuple[int, H2ErrorCode] | None:
        """The last stream and the error code of GOAWAY; None before it was received."""
        goaways = [sent for sent in self.frames() if isinstance(sent, GoAwayFrame)]
        return (goaways[-1].last_stream_id, H2ErrorCode(goaways[-1].error_code)) if goaways else None


def first_window(size: int) -> bytes:
    return frames.SETTING.pack(frames.INITIAL_WINDOW_SIZE, size)
