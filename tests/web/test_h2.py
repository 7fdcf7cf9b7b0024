"""HTTP/2 as it comes over the wire: many at once, in pieces, against windows, broken, hostile."""

import asyncio
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hpack import Decoder, Encoder
from hyperframe.frame import DataFrame, Frame, GoAwayFrame, HeadersFrame, RstStreamFrame, SettingsFrame
from hypothesis import given
from hypothesis import strategies as st

from gputile.web import frames, h2
from gputile.web.frames import ACK, END_HEADERS, END_STREAM, PADDED, WITH_PRIORITY, Code, frame
from gputile.web.h2 import H2Connection
from gputile.web.messages import IDLE, LONGEST_HEAD, SLOW, Response
from gputile.web.server import Listener
from tests.effort import examples
from tests.web.wire import Echo, Wire, hear

Fields = list[tuple[bytes, bytes]]


class Talk:
    """A client of few words. What it hears is read by another implementation."""

    def __init__(self, listener: Listener | None = None, *, known: bool = False, settings: bytes = b"") -> None:
        self.listener = listener or Echo()
        self.wire = Wire(known=known)
        self.connection = H2Connection(self.listener)
        self.connection.connection_made(self.wire)
        self._encoder, self._decoder = Encoder(), Decoder()
        self._decoder.max_allowed_table_size = 0
        self._read, self.heard = 0, list[Frame]()
        self._begin = frames.PREFACE + frame(frames.SETTINGS, payload=settings)

    def say(self, *parts: bytes) -> "Talk":
        hear(self.connection, self._begin + b"".join(parts))
        self._begin = b""
        return self

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

    # ---- what came back ---------------------------------------------------------------------------------------------

    def frames(self) -> list[Frame]:
        """All so far."""
        while self._read < len(self.wire.sent):
            found, length = Frame.parse_frame_header(memoryview(self.wire.sent[self._read : self._read + 9]))
            self._read += 9
            found.parse_body(memoryview(self.wire.sent[self._read : self._read + length]))
            self._read += length
            self.heard.append(found)
        return self.heard

    def answers(self) -> dict[int, bytes]:
        """The bodies of those answers that have ended."""
        bodies: dict[int, bytes] = {}
        for one in self.frames():
            if isinstance(one, DataFrame):
                bodies[one.stream_id] = bodies.get(one.stream_id, b"") + one.data
        return {number: bodies.get(number, b"") for number in self.ended()}

    def ended(self) -> list[int]:
        return [one.stream_id for one in self.frames() if "END_STREAM" in one.flags]

    def heads(self) -> list[dict[bytes, bytes]]:
        """Of all answers; to be asked once, for the decoder remembers."""
        blocks = [one.data for one in self.frames() if isinstance(one, HeadersFrame)]
        return [dict(self._decoder.decode(block, raw=True)) for block in blocks]

    def resets(self) -> dict[int, Code]:
        return {one.stream_id: Code(one.error_code) for one in self.frames() if isinstance(one, RstStreamFrame)}

    def farewell(self) -> tuple[int, Code] | None:
        """The last stream, and why."""
        found = [one for one in self.frames() if isinstance(one, GoAwayFrame)]
        return (found[-1].last_stream_id, Code(found[-1].error_code)) if found else None


def first_window(size: int) -> bytes:
    return frames.SETTING.pack(frames.INITIAL_WINDOW_SIZE, size)


# ---- questions and answers ------------------------------------------------------------------------------------------


async def test_a_question_is_answered_in_the_turn_of_its_last_byte_and_in_one_write() -> None:
    talk = Talk().say()
    before = talk.wire.writes
    talk.say(talk.post(1, b"hello"))
    assert talk.answers() == {1: b"hello"}
    assert talk.wire.writes == before + 1
    assert talk.heads() == [{b":status": b"200", b"content-type": b"application/json", b"content-length": b"5"}]


async def test_the_first_words_are_settings_a_wide_window_and_an_acknowledgement() -> None:
    first, window, acknowledged = Talk().say().frames()
    assert isinstance(first, SettingsFrame)
    assert first.settings == {3: h2.MOST_STREAMS, 4: h2.WINDOW, 5: h2.LARGEST_TAKEN, 6: LONGEST_HEAD}
    assert (window.stream_id, window.window_increment) == (0, h2.WINDOW - 65535)  # type: ignore[attr-defined]
    assert "ACK" in acknowledged.flags


@examples(60)
@given(st.lists(st.integers(0, 2000), max_size=16))
async def test_any_cutting_of_the_bytes_gives_the_same_answers(cuts: list[int]) -> None:
    talk = Talk(settings=first_window(70_000))
    padded = frame(frames.DATA, END_STREAM | PADDED, 3, b"\x03two\0\0\0")
    parts = [
        talk.post(1, b"one"),
        frame(frames.PING, 0, 0, b"12345678"),
        headed(talk, 3, b"3"),
        frame(frames.PRIORITY, 0, 3, b"\0\0\0\0\x10"),
        padded,
    ]
    block = talk.block("/b?x=1", [(b"expect", b"100-continue")])
    parts += [
        frame(frames.HEADERS, WITH_PRIORITY, 5, b"\0\0\0\0\x10" + block[:7]),
        frame(frames.CONTINUATION, 0, 5),
        frame(frames.CONTINUATION, END_HEADERS, 5, block[7:]),
        frame(0xFA, 0xFF, 5, b"nobody knows"),
        frame(frames.DATA, 0, 5, b"thr"),
        talk.post(7, b"four"),
        frame(frames.DATA, 0, 5, b"ee"),
        frame(frames.HEADERS, END_HEADERS | END_STREAM, 5, talk.raw([(b"trailer", b"1")])),
        frame(frames.WINDOW_UPDATE, 0, 0, b"\0\0\1\0"),
    ]
    whole = talk._begin + b"".join(parts)
    talk._begin = b""
    for start, end in pairwise(sorted({0, len(whole), *(cut % len(whole) for cut in cuts)})):
        hear(talk.connection, whole[start:end])
    assert talk.answers() == {1: b"one", 3: b"two", 5: b"three", 7: b"four"}
    assert [request.path for request in talk.listener.asked] == ["/a", "/a", "/a", "/b"]  # type: ignore[attr-defined]
    assert (talk.resets(), talk.farewell()) == ({}, None)


async def test_answers_that_take_time_hold_up_nobody() -> None:
    listener = Echo()
    talk = Talk(listener).say()
    talk.say(talk.post(1, b"bind", "/wait"), talk.post(3, b"bind too", "/wait"), talk.post(5, b"filter"))
    assert talk.answers() == {5: b"filter"}
    listener.gate.set()
    await listener.idle()
    assert talk.answers() == {5: b"filter", 1: b"bind", 3: b"bind too"}


async def test_a_head_request_gets_its_length_and_no_body() -> None:
    talk = Talk().say()
    ask = [(b":method", b"HEAD"), (b":scheme", b"https"), (b":path", b"/healthz")]
    talk.say(frame(frames.HEADERS, END_HEADERS, 1, talk.raw(ask)), frame(frames.DATA, END_STREAM, 1, b"ok"))
    assert talk.answers() == {1: b""}
    assert talk.heads()[0][b"content-length"] == b"2"


async def test_whoever_has_a_checked_certificate_is_known() -> None:
    listener = Echo()
    for known in (True, False):
        talk = Talk(listener, known=known)
        talk.say(talk.post(1))
    assert [request.is_known for request in listener.asked] == [True, False]


async def test_a_body_that_is_too_large_is_counted_and_dropped() -> None:
    listener = Echo(limit=10)
    talk = Talk(listener).say()
    talk.say(talk.post(1, b"0123456789"), talk.post(3, b"0123456789!"))
    assert [(asked.body, asked.is_too_large) for asked in listener.asked] == [(b"0123456789", False), (b"", True)]


# ---- windows --------------------------------------------------------------------------------------------------------


async def test_an_answer_waits_for_the_streams_window() -> None:
    talk = Talk(settings=first_window(4)).say()
    talk.say(talk.post(1, b"0123456789"), talk.post(3, b"abc"))
    assert talk.answers() == {3: b"abc"}
    talk.say(frames.window_update(1, 5))
    assert talk.ended() == [3]
    talk.say(frames.window_update(1, 1))
    assert talk.answers() == {3: b"abc", 1: b"0123456789"}


async def test_an_answer_waits_for_the_connections_window() -> None:
    talk = Talk(Echo(limit=10**6), settings=first_window(10**6)).say()
    talk.say(talk.post(1, b"x" * 65_000), talk.post(3, b"y" * 1000), talk.post(5, b"z"))
    assert talk.ended() == [1]
    talk.say(frames.window_update(3, 1000))
    assert talk.ended() == [1], "that window was not the one that was shut"
    talk.say(frames.window_update(0, 466))
    assert talk.answers() == {1: b"x" * 65_000, 3: b"y" * 1000, 5: b"z"}


async def test_a_new_first_window_moves_the_windows_of_open_streams_even_below_nought() -> None:
    talk = Talk(settings=first_window(4)).say()
    talk.say(talk.post(1, b"0123456789"))
    talk.say(frame(frames.SETTINGS, payload=first_window(1)))  # three below nought
    talk.say(frames.window_update(1, 3))
    assert len(data_of(talk)) == 4
    talk.say(frame(frames.SETTINGS, payload=first_window(7)))
    assert talk.answers() == {1: b"0123456789"}


async def test_a_large_answer_is_cut_into_frames_that_the_client_takes() -> None:
    talk = Talk(Echo(limit=10**6), settings=first_window(10**6)).say(frames.window_update(0, 10**6))
    talk.say(talk.post(1, b"x" * 100_000))
    sizes = [len(one.data) for one in talk.frames() if isinstance(one, DataFrame)]
    assert (max(sizes), sum(sizes)) == (16384, 100_000)
    talk.say(frame(frames.SETTINGS, payload=frames.SETTING.pack(frames.MAX_FRAME_SIZE, 50_000)))
    talk.say(talk.post(3, b"x" * 100_000))
    assert max(len(one.data) for one in talk.frames() if isinstance(one, DataFrame)) == 50_000


async def test_our_own_window_is_widened_before_it_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h2, "WINDOW", 100_000)
    talk = Talk(Echo(limit=10**6)).say()
    talk.say(talk.post(1, b"x" * 49_999))
    assert len(widened(talk)) == 1
    talk.say(frame(frames.HEADERS, END_HEADERS, 3, talk.block("/a", [])), frame(frames.DATA, PADDED, 3, b"\0"))
    assert widened(talk)[1:] == [50_000], "padding counts"


def widened(talk: Talk) -> list[int]:
    return [one.window_increment for one in talk.frames() if one.type == frames.WINDOW_UPDATE]  # type: ignore[attr-defined]


def data_of(talk: Talk) -> bytes:
    return b"".join(one.data for one in talk.frames() if isinstance(one, DataFrame))


async def test_who_does_not_read_is_not_heard() -> None:
    talk = Talk(Echo(limit=10**6)).say()
    talk.connection.pause_writing()
    assert talk.wire.paused
    talk.say(talk.post(1, b"what was on its way"))
    assert talk.ended() == []
    talk.connection.resume_writing()
    assert talk.answers() == {1: b"what was on its way"}
    assert not talk.wire.paused


# ---- what is refused ------------------------------------------------------------------------------------------------

GOOD: Fields = [(b":method", b"GET"), (b":scheme", b"https"), (b":path", b"/")]


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(GOOD[1:], id="no-method"),
        pytest.param([GOOD[0], GOOD[2]], id="no-scheme"),
        pytest.param(GOOD[:2], id="no-path"),
        pytest.param([*GOOD[:2], (b":path", b"")], id="an-empty-path"),
        pytest.param([*GOOD[:2], (b":path", b"/a\nb")], id="a-path-of-two-lines"),
        pytest.param([(b":method", b"CONNECT"), (b":authority", b"x:1")], id="connect"),
        pytest.param([*GOOD, GOOD[0]], id="two-methods"),
        pytest.param([*GOOD, (b":status", b"200")], id="a-pseudo-header-of-answers"),
        pytest.param([(b"accept", b"*/*"), *GOOD], id="a-pseudo-header-that-comes-late"),
        pytest.param([*GOOD, (b"Accept", b"*/*")], id="upper-case"),
        pytest.param([*GOOD, (b"", b"x")], id="no-name"),
        pytest.param([*GOOD, (b"a b", b"x")], id="a-name-with-a-space"),
        pytest.param([*GOOD, (b"a", b"x\r\ny: z")], id="a-value-of-two-lines"),
        pytest.param([*GOOD, (b"a", b" x")], id="a-value-that-begins-with-a-space"),
        pytest.param([*GOOD, (b"connection", b"close")], id="connection"),
        pytest.param([*GOOD, (b"transfer-encoding", b"chunked")], id="transfer-encoding"),
        pytest.param([*GOOD, (b"te", b"gzip")], id="te"),
        pytest.param([*GOOD, (b"content-length", b"-1")], id="a-negative-length"),
        pytest.param([*GOOD, (b"content-length", b"9" * 40)], id="an-endless-length"),
        pytest.param([*GOOD, (b"content-length", b"0"), (b"content-length", b"0")], id="two-lengths"),
        pytest.param([*GOOD, (b"content-length", b"1")], id="a-length-and-no-body"),
    ],
)
async def test_a_malformed_question_is_reset_and_harms_no_other(fields: Fields) -> None:
    listener = Echo()
    talk = Talk(listener).say()
    talk.say(frame(frames.HEADERS, END_HEADERS | END_STREAM, 1, talk.raw(fields)), talk.post(3, b"x"))
    assert talk.resets() == {1: Code.PROTOCOL_ERROR}
    assert talk.answers() == {3: b"x"}
    assert len(listener.asked) == 1


def headed(talk: Talk, number: int = 1, length: bytes = b"5") -> bytes:
    return frame(frames.HEADERS, END_HEADERS, number, talk.block("/a", [(b"content-length", length)]))


async def test_a_body_that_is_not_as_long_as_it_says() -> None:
    listener = Echo()
    talk = Talk(listener).say()
    talk.say(headed(talk, 1), frame(frames.DATA, 0, 1, b"123456"), frame(frames.DATA, END_STREAM, 1, b"late"))
    talk.say(headed(talk, 3), frame(frames.DATA, END_STREAM, 3, b"1234"))
    assert talk.resets() == {1: Code.PROTOCOL_ERROR, 3: Code.PROTOCOL_ERROR}
    assert listener.asked == []


async def test_frames_behind_the_end_of_a_question() -> None:
    listener = Echo()
    talk = Talk(listener).say()
    talk.say(talk.post(1, b"x", "/wait"), frame(frames.DATA, 0, 1, b"more"))
    talk.say(talk.post(3, b"x"), frame(frames.HEADERS, END_HEADERS | END_STREAM, 3, talk.raw([])))
    assert talk.resets() == {1: Code.STREAM_CLOSED, 3: Code.STREAM_CLOSED}
    listener.gate.set()
    await listener.idle()
    assert talk.ended() == [3]


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        pytest.param(frame(frames.DATA, 0, 0, b"x"), Code.PROTOCOL_ERROR, id="a-body-of-nothing"),
        pytest.param(frame(frames.DATA, 0, 1, b"x"), Code.PROTOCOL_ERROR, id="a-body-before-its-headers"),
        pytest.param(frame(frames.DATA, PADDED, 1, b"\x01"), Code.PROTOCOL_ERROR, id="more-padding-than-room"),
        pytest.param(frame(frames.HEADERS, END_HEADERS, 0, b"\x82"), Code.PROTOCOL_ERROR, id="headers-of-nothing"),
        pytest.param(frame(frames.HEADERS, END_HEADERS, 2, b"\x82"), Code.PROTOCOL_ERROR, id="an-even-stream"),
        pytest.param(frame(frames.HEADERS, WITH_PRIORITY, 1, b"\0"), Code.FRAME_SIZE_ERROR, id="half-a-priority"),
        pytest.param(frame(frames.HEADERS, END_HEADERS, 1, b"\xff"), Code.COMPRESSION_ERROR, id="broken-headers"),
        pytest.param(frame(frames.CONTINUATION, 0, 1, b""), Code.PROTOCOL_ERROR, id="going-on-with-nothing"),
        pytest.param(
            frame(frames.HEADERS, 0, 1, b"\x82") + frame(frames.PING, 0, 0, bytes(8)),
            Code.PROTOCOL_ERROR,
            id="something-between-headers",
        ),
        pytest.param(
            frame(frames.HEADERS, 0, 1, b"\x82") + frame(frames.CONTINUATION, END_HEADERS, 3, b"\x87"),
            Code.PROTOCOL_ERROR,
            id="headers-that-go-on-elsewhere",
        ),
        pytest.param(frame(frames.RST_STREAM, 0, 1, bytes(4)), Code.PROTOCOL_ERROR, id="a-reset-of-nothing"),
        pytest.param(frame(frames.RST_STREAM, 0, 1, bytes(3)), Code.FRAME_SIZE_ERROR, id="half-a-reset"),
        pytest.param(frame(frames.SETTINGS, 0, 1), Code.PROTOCOL_ERROR, id="settings-of-a-stream"),
        pytest.param(frame(frames.SETTINGS, 0, 0, b"x"), Code.FRAME_SIZE_ERROR, id="half-a-setting"),
        pytest.param(frame(frames.SETTINGS, ACK, 0, bytes(6)), Code.FRAME_SIZE_ERROR, id="a-full-acknowledgement"),
        pytest.param(
            frame(frames.SETTINGS, 0, 0, first_window(2**31)), Code.FLOW_CONTROL_ERROR, id="too-wide-a-first-window"
        ),
        pytest.param(frame(frames.SETTINGS, 0, 0, b"\0\5\0\0\0\1"), Code.PROTOCOL_ERROR, id="frames-of-one-byte"),
        pytest.param(frame(frames.SETTINGS, 0, 0, b"\0\2\0\0\0\2"), Code.PROTOCOL_ERROR, id="push-two"),
        pytest.param(frame(frames.PUSH_PROMISE, 0, 1, bytes(4)), Code.PROTOCOL_ERROR, id="a-promise"),
        pytest.param(frame(frames.PING, 0, 0, bytes(7)), Code.FRAME_SIZE_ERROR, id="a-short-ping"),
        pytest.param(frame(frames.PING, 0, 1, bytes(8)), Code.PROTOCOL_ERROR, id="a-ping-of-a-stream"),
        pytest.param(frames.window_update(0, 0), Code.PROTOCOL_ERROR, id="a-window-widened-by-nothing"),
        pytest.param(frames.window_update(0, 2**31 - 1), Code.FLOW_CONTROL_ERROR, id="a-window-beyond-all-windows"),
        pytest.param(frames.window_update(1, 1), Code.PROTOCOL_ERROR, id="the-window-of-no-stream"),
        pytest.param(frames.head(frames.DATA, 0, 1, 2**17 + 1), Code.FRAME_SIZE_ERROR, id="too-large-a-frame"),
    ],
)
async def test_what_ends_the_connection(sent: bytes, code: Code) -> None:
    talk = Talk().say(sent, b"\0" * 100)
    assert talk.farewell() == (0, code)
    assert talk.wire.closed


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", id="http-1"),
        pytest.param(frames.PREFACE + frame(frames.PING, 0, 0, bytes(8)), id="a-ping-before-the-settings"),
        pytest.param(frames.PREFACE + frame(frames.SETTINGS, ACK), id="an-acknowledgement-before-the-settings"),
    ],
)
async def test_a_begin_that_is_none(sent: bytes) -> None:
    talk = Talk()
    hear(talk.connection, sent)
    assert talk.farewell() == (0, Code.PROTOCOL_ERROR)
    assert talk.wire.closed


@examples(300)
@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 255), st.integers(0, 5), st.binary(max_size=40))))
async def test_nonsense_raises_nothing(sent: list[tuple[int, int, int, bytes]]) -> None:
    talk = Talk().say(b"".join(frame(*one) for one in sent))
    talk.frames()
    talk.connection.connection_lost(None)


# ---- floods ---------------------------------------------------------------------------------------------------------


def ask_and_take_back(talk: Talk, numbers: Iterable[int]) -> list[bytes]:
    return [talk.post(n, b"x", "/wait") + frames.reset(n, Code.CANCEL) for n in numbers]


@pytest.mark.parametrize(
    "noise",
    [
        pytest.param(frame(frames.PING, 0, 0, bytes(8)), id="pings"),
        pytest.param(frame(frames.PING, ACK, 0, bytes(8)), id="answers-to-no-ping"),
        pytest.param(frame(frames.SETTINGS), id="settings"),
        pytest.param(frame(frames.SETTINGS, ACK), id="acknowledgements"),
        pytest.param(frame(frames.PRIORITY, 0, 1, bytes(5)), id="priorities"),
        pytest.param(frame(frames.DATA, 0, 1), id="empty-data"),
        pytest.param(frames.window_update(0, 1), id="windows"),
        pytest.param(frame(0xFA, 0, 0), id="unknown-frames"),
    ],
)
async def test_a_flood_of_frames_that_ask_for_nothing(noise: bytes) -> None:
    talk = Talk().say()
    talk.say(headed(talk), noise * (h2.MOST_NOISE - 10))
    assert talk.farewell() is None
    talk.connection.sweep(1.0)
    talk.say(noise * (h2.MOST_NOISE - 10))
    assert talk.farewell() is None, "it is a matter of how many in which time"
    talk.say(noise * 20)
    assert talk.farewell() == (1, Code.ENHANCE_YOUR_CALM)


async def test_a_flood_of_empty_continuations() -> None:
    talk = Talk().say(frame(frames.HEADERS, 0, 1, b"\x82"), frame(frames.CONTINUATION, 0, 1) * (h2.MOST_NOISE + 1))
    assert talk.farewell() == (0, Code.ENHANCE_YOUR_CALM)


@pytest.mark.parametrize("piece", [b"\x00\x01a\x01b", b"\x82"], ids=["long-as-sent", "long-when-unpacked"])
async def test_headers_without_end(piece: bytes) -> None:
    talk = Talk().say(frame(frames.HEADERS, 0, 1, piece * 1000))
    for _ in range(LONGEST_HEAD // len(piece * 1000) + 1):
        talk.say(frame(frames.CONTINUATION, 0, 1, piece * 1000))
        if talk.farewell():
            break
    else:
        talk.say(frame(frames.CONTINUATION, END_HEADERS, 1))
    assert talk.farewell() == (0, Code.ENHANCE_YOUR_CALM)


async def test_windows_are_no_noise_where_large_answers_account_for_them() -> None:
    talk = Talk(Echo(limit=10**6), settings=first_window(10**6)).say(frames.window_update(0, 10**9))
    for number in range(1, 21, 2):
        talk.say(talk.post(number, b"x" * 300_000), frames.window_update(0, 2000) * 150)
    assert (len(talk.ended()), talk.farewell()) == (10, None)


async def test_questions_that_are_taken_back_at_once() -> None:
    """Work that was begun goes on, so it counts among what is open: nobody gets more by taking back."""
    listener = Echo()
    talk = Talk(listener).say()
    talk.say(*ask_and_take_back(talk, range(1, 601, 2)))
    assert len(listener.asked) == h2.MOST_STREAMS
    assert set(talk.resets().values()) == {Code.REFUSED_STREAM}
    assert len(talk.resets()) == 50
    talk.say(*ask_and_take_back(talk, range(601, 1201, 2)))
    assert talk.farewell() is not None
    assert talk.farewell()[1] == Code.ENHANCE_YOUR_CALM  # type: ignore[index]
    listener.gate.set()
    await listener.idle()
    assert len(listener.finished) == h2.MOST_STREAMS, "a bind that was asked for is a bind"
    assert talk.ended() == []


async def test_work_for_those_who_took_it_back_makes_room_when_it_is_done() -> None:
    listener = Echo()
    talk = Talk(listener).say()
    talk.say(*ask_and_take_back(talk, range(1, 501, 2)))
    talk.say(talk.post(501, b"x"))
    assert talk.resets() == {501: Code.REFUSED_STREAM}
    listener.gate.set()
    await listener.idle()
    talk.say(talk.post(503, b"y"))
    assert talk.answers() == {503: b"y"}


async def test_more_streams_than_announced() -> None:
    talk = Talk().say()
    talk.say(*(headed(talk, number) for number in range(1, 505, 2)))
    assert talk.resets() == {501: Code.REFUSED_STREAM, 503: Code.REFUSED_STREAM}
    talk.say(frame(frames.DATA, END_STREAM, 501, b"on its way"), frame(frames.DATA, END_STREAM, 1, b"12345"))
    assert talk.answers() == {1: b"12345"}


async def test_bodies_that_are_never_whole() -> None:
    talk = Talk(Echo(limit=100)).say()
    for number in (1, 3, 5, 7):
        talk.say(headed(talk, number, b"101"), frame(frames.DATA, 0, number, b"x" * 100))
    assert talk.resets() == {}
    talk.say(headed(talk, 9), frame(frames.DATA, 0, 9, b"x"))
    assert talk.resets() == {9: Code.ENHANCE_YOUR_CALM}
    talk.say(frame(frames.DATA, END_STREAM, 1, b"x"), talk.post(11, b"x"))
    assert talk.answers() == {1: b"", 11: b"x"}


async def test_answers_that_nobody_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h2, "MOST_WAITING", 150)
    talk = Talk(settings=first_window(0)).say()
    talk.say(*(talk.post(number, b"x" * 100) for number in (1, 3, 5)))
    assert talk.resets() == {5: Code.REFUSED_STREAM}
    talk.say(frames.reset(1, Code.CANCEL), talk.post(7, b""))
    assert talk.ended() == [7]


# ---- ends -----------------------------------------------------------------------------------------------------------


async def test_who_does_not_lead_says_goodbye_behind_the_answer_and_takes_nothing_more() -> None:
    """Go opens another connection, and asks again there whatever was above the last stream."""
    listener = Echo()
    talk = Talk(listener).say()
    talk.say(talk.post(1, b"bind", "/wait"), talk.post(3, b"filter", "/close"), talk.post(5, b"next"))
    assert talk.farewell() == (3, Code.NO_ERROR)
    assert talk.answers() == {3: b"filter"}
    assert [request.path for request in listener.asked] == ["/wait", "/close"]
    talk.connection.sweep(1.0)
    assert not talk.wire.closed, "somebody still waits"
    listener.gate.set()
    await listener.idle()
    assert talk.answers() == {3: b"filter", 1: b"bind"}
    talk.connection.sweep(2.0)
    assert talk.wire.closed


async def test_stopping_says_goodbye_first_and_answers_what_was_asked() -> None:
    listener = Echo()
    talk = Talk(listener).say()
    talk.say(talk.post(1, b"bind", "/wait"))
    await listener.start("127.0.0.1", 0, None)
    stopping = asyncio.create_task(listener.stop())
    await asyncio.sleep(0)
    assert talk.farewell() == (1, Code.NO_ERROR)
    assert not talk.wire.closed
    listener.gate.set()
    await stopping
    assert talk.answers() == {1: b"bind"}
    assert talk.wire.closed


async def test_stopping_waits_for_work_whose_client_has_gone() -> None:
    listener = Echo()
    talk = Talk(listener).say()
    talk.say(talk.post(1, b"bind", "/wait"))
    talk.connection.connection_lost(None)
    await listener.start("127.0.0.1", 0, None)
    stopping = asyncio.create_task(listener.stop())
    await asyncio.sleep(0)
    assert not stopping.done()
    listener.gate.set()
    await stopping
    assert len(listener.finished) == 1


async def test_a_bug_of_ours_resets_its_own_stream_only(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: list[asyncio.Task[None]] = []

    async def crash() -> Response:
        raise RuntimeError("a bug")

    listener = Listener(lambda request: crash() if request.path == "/bug" else Response(b"fine"), 100)
    monkeypatch.setattr(listener, "work", tasks.append)
    talk = Talk(listener).say()
    talk.say(talk.post(1, b"x", "/bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        await tasks[0]
    talk.say(talk.post(3, b"x"))
    assert talk.resets() == {1: Code.INTERNAL_ERROR}
    assert talk.answers() == {3: b"fine"}


@pytest.mark.parametrize(
    ("path", "seconds", "stays"),
    [
        pytest.param("/a", IDLE - 1, True, id="idle-for-a-while"),
        pytest.param("/a", IDLE + 1, False, id="idle-for-too-long"),
        pytest.param("/wait", IDLE + 1, True, id="we-are-the-slow-one"),
    ],
)
async def test_who_is_let_go(path: str, seconds: float, stays: bool) -> None:
    listener = Echo()
    talk = Talk(listener).say()
    talk.say(talk.post(1, b"x", path))
    talk.say(frame(frames.PING, 0, 0, bytes(8)))
    talk.connection.sweep(seconds)
    assert talk.wire.closed is not stays
    assert (talk.farewell() is None) is stays
    listener.gate.set()
    await listener.idle()


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="no-preface"),
        pytest.param(frames.PREFACE[:10], id="half-a-preface"),
        pytest.param(frames.PREFACE, id="no-settings"),
        pytest.param(frames.PREFACE + frame(frames.SETTINGS) + b"\0\0\x08", id="half-a-frame"),
        pytest.param(frames.PREFACE + frame(frames.SETTINGS) + frame(frames.HEADERS, 0, 1), id="half-the-headers"),
    ],
)
async def test_who_never_comes_to_the_point(sent: bytes) -> None:
    talk = Talk()
    hear(talk.connection, sent)
    talk.connection.sweep(SLOW - 1)
    assert not talk.wire.closed
    talk.connection.sweep(SLOW + 1)
    assert talk.wire.closed


async def test_a_question_or_an_answer_that_stalls_is_reset_alone() -> None:
    listener = Echo()
    talk = Talk(listener, settings=first_window(2)).say()
    talk.say(headed(talk, 1), talk.post(3, b"an answer that is not fetched"), talk.post(5, b"bind", "/wait"))
    talk.connection.sweep(SLOW + 1)
    assert talk.resets() == {1: Code.CANCEL, 3: Code.CANCEL}
    assert not talk.wire.closed
    listener.gate.set()
    await listener.idle()


async def test_who_does_not_even_read_the_farewell_is_cut_off() -> None:
    talk = Talk().say()
    talk.connection.pause_writing()
    talk.connection.sweep(IDLE + 1)
    assert talk.wire.aborted
