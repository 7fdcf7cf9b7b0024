"""HTTP/2 as it comes over the wire: many at once, in pieces, against windows, broken."""

from itertools import pairwise

import pytest
from hyperframe.frame import DataFrame, SettingsFrame
from hypothesis import given
from hypothesis import strategies as st

from gputile.http import h2_frames, h2_server
from gputile.http.h2_frames import ACK, END_HEADERS, END_STREAM, PADDED, WITH_PRIORITY, H2ErrorCode, frame
from gputile.http.messages import LONGEST_HEAD, SLOW
from tests.effort import examples
from tests.http.talk import Fields, Talk, first_window
from tests.http.wire import Echo, hear

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
    assert first.settings == {
        3: h2_server.ASKED_STREAMS,
        4: h2_server.WINDOW,
        5: h2_server.LARGEST_TAKEN,
        6: LONGEST_HEAD,
    }
    assert (window.stream_id, window.window_increment) == (0, h2_server.WINDOW - 65535)  # type: ignore[attr-defined]
    assert "ACK" in acknowledged.flags


@examples(60)
@given(st.lists(st.integers(0, 2000), max_size=16))
async def test_any_cutting_of_the_bytes_gives_the_same_answers(cuts: list[int]) -> None:
    talk = Talk(settings=first_window(70_000))
    padded = frame(h2_frames.DATA, END_STREAM | PADDED, 3, b"\x03two\0\0\0")
    parts = [
        talk.post(1, b"one"),
        frame(h2_frames.PING, 0, 0, b"12345678"),
        talk.headed(3, b"3"),
        frame(h2_frames.PRIORITY, 0, 3, b"\0\0\0\0\x10"),
        padded,
    ]
    block = talk.block("/b?x=1", [(b"expect", b"100-continue")])
    parts += [
        frame(h2_frames.HEADERS, WITH_PRIORITY, 5, b"\0\0\0\0\x10" + block[:7]),
        frame(h2_frames.CONTINUATION, 0, 5),
        frame(h2_frames.CONTINUATION, END_HEADERS, 5, block[7:]),
        frame(0xFA, 0xFF, 5, b"nobody knows"),
        frame(h2_frames.DATA, 0, 5, b"thr"),
        talk.post(7, b"four"),
        frame(h2_frames.DATA, 0, 5, b"ee"),
        frame(h2_frames.HEADERS, END_HEADERS | END_STREAM, 5, talk.raw([(b"trailer", b"1")])),
        frame(h2_frames.WINDOW_UPDATE, 0, 0, b"\0\0\1\0"),
    ]
    whole = talk.begin() + b"".join(parts)
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
    talk.say(frame(h2_frames.HEADERS, END_HEADERS, 1, talk.raw(ask)), frame(h2_frames.DATA, END_STREAM, 1, b"ok"))
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
    talk.say(h2_frames.window_update(1, 5))
    assert talk.ended() == [3]
    talk.say(h2_frames.window_update(1, 1))
    assert talk.answers() == {3: b"abc", 1: b"0123456789"}


async def test_an_answer_waits_for_the_connections_window() -> None:
    talk = Talk(Echo(limit=10**6), settings=first_window(10**6)).say()
    talk.say(talk.post(1, b"x" * 65_000), talk.post(3, b"y" * 1000), talk.post(5, b"z"))
    assert talk.ended() == [1]
    talk.say(h2_frames.window_update(3, 1000))
    assert talk.ended() == [1], "that window was not the one that was shut"
    talk.say(h2_frames.window_update(0, 466))
    assert talk.answers() == {1: b"x" * 65_000, 3: b"y" * 1000, 5: b"z"}


async def test_a_new_first_window_moves_the_windows_of_open_streams_even_below_nought() -> None:
    talk = Talk(settings=first_window(4)).say()
    talk.say(talk.post(1, b"0123456789"))
    talk.say(frame(h2_frames.SETTINGS, payload=first_window(1)))  # three below nought
    talk.say(h2_frames.window_update(1, 3))
    assert len(data_of(talk)) == 4
    talk.say(frame(h2_frames.SETTINGS, payload=first_window(7)))
    assert talk.answers() == {1: b"0123456789"}


async def test_a_large_answer_is_cut_into_frames_that_the_client_takes() -> None:
    talk = Talk(Echo(limit=10**6), settings=first_window(10**6)).say(h2_frames.window_update(0, 10**6))
    talk.say(talk.post(1, b"x" * 100_000))
    sizes = [len(one.data) for one in talk.frames() if isinstance(one, DataFrame)]
    assert (max(sizes), sum(sizes)) == (16384, 100_000)
    talk.say(frame(h2_frames.SETTINGS, payload=h2_frames.SETTING.pack(h2_frames.MAX_FRAME_SIZE, 50_000)))
    talk.say(talk.post(3, b"x" * 100_000))
    assert max(len(one.data) for one in talk.frames() if isinstance(one, DataFrame)) == 50_000


async def test_our_own_window_is_widened_before_it_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h2_server, "WINDOW", 100_000)
    talk = Talk(Echo(limit=10**6)).say()
    talk.say(talk.post(1, b"x" * 49_999))
    assert len(widened(talk)) == 1
    talk.say(frame(h2_frames.HEADERS, END_HEADERS, 3, talk.block("/a", [])), frame(h2_frames.DATA, PADDED, 3, b"\0"))
    assert widened(talk)[1:] == [50_000], "padding counts"


def widened(talk: Talk) -> list[int]:
    return [one.window_increment for one in talk.frames() if one.type == h2_frames.WINDOW_UPDATE]  # type: ignore[attr-defined]


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
    talk.say(frame(h2_frames.HEADERS, END_HEADERS | END_STREAM, 1, talk.raw(fields)), talk.post(3, b"x"))
    assert talk.resets() == {1: H2ErrorCode.PROTOCOL_ERROR}
    assert talk.answers() == {3: b"x"}
    assert len(listener.asked) == 1


async def test_a_body_that_is_not_as_long_as_it_says() -> None:
    listener = Echo()
    talk = Talk(listener).say()
    talk.say(talk.headed(1), frame(h2_frames.DATA, 0, 1, b"123456"), frame(h2_frames.DATA, END_STREAM, 1, b"late"))
    talk.say(talk.headed(3), frame(h2_frames.DATA, END_STREAM, 3, b"1234"))
    assert talk.resets() == {1: H2ErrorCode.PROTOCOL_ERROR, 3: H2ErrorCode.PROTOCOL_ERROR}
    assert listener.asked == []


async def test_frames_behind_the_end_of_a_question() -> None:
    listener = Echo()
    talk = Talk(listener).say()
    talk.say(talk.post(1, b"x", "/wait"), frame(h2_frames.DATA, 0, 1, b"more"))
    talk.say(talk.post(3, b"x"), frame(h2_frames.HEADERS, END_HEADERS | END_STREAM, 3, talk.raw([])))
    assert talk.resets() == {1: H2ErrorCode.STREAM_CLOSED, 3: H2ErrorCode.STREAM_CLOSED}
    listener.gate.set()
    await listener.idle()
    assert talk.ended() == [3]


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        pytest.param(frame(h2_frames.DATA, 0, 0, b"x"), H2ErrorCode.PROTOCOL_ERROR, id="a-body-of-nothing"),
        pytest.param(frame(h2_frames.DATA, 0, 1, b"x"), H2ErrorCode.PROTOCOL_ERROR, id="a-body-before-its-headers"),
        pytest.param(
            frame(h2_frames.DATA, PADDED, 1, b"\x01"), H2ErrorCode.PROTOCOL_ERROR, id="more-padding-than-room"
        ),
        pytest.param(
            frame(h2_frames.HEADERS, END_HEADERS, 0, b"\x82"), H2ErrorCode.PROTOCOL_ERROR, id="headers-of-nothing"
        ),
        pytest.param(
            frame(h2_frames.HEADERS, END_HEADERS, 2, b"\x82"), H2ErrorCode.PROTOCOL_ERROR, id="an-even-stream"
        ),
        pytest.param(
            frame(h2_frames.HEADERS, WITH_PRIORITY, 1, b"\0"), H2ErrorCode.FRAME_SIZE_ERROR, id="half-a-priority"
        ),
        pytest.param(
            frame(h2_frames.HEADERS, END_HEADERS, 1, b"\xff"), H2ErrorCode.COMPRESSION_ERROR, id="broken-headers"
        ),
        pytest.param(frame(h2_frames.CONTINUATION, 0, 1, b""), H2ErrorCode.PROTOCOL_ERROR, id="going-on-with-nothing"),
        pytest.param(
            frame(h2_frames.HEADERS, 0, 1, b"\x82") + frame(h2_frames.PING, 0, 0, bytes(8)),
            H2ErrorCode.PROTOCOL_ERROR,
            id="something-between-headers",
        ),
        pytest.param(
            frame(h2_frames.HEADERS, 0, 1, b"\x82") + frame(h2_frames.CONTINUATION, END_HEADERS, 3, b"\x87"),
            H2ErrorCode.PROTOCOL_ERROR,
            id="headers-that-go-on-elsewhere",
        ),
        pytest.param(frame(h2_frames.RST_STREAM, 0, 1, bytes(4)), H2ErrorCode.PROTOCOL_ERROR, id="a-reset-of-nothing"),
        pytest.param(frame(h2_frames.RST_STREAM, 0, 1, bytes(3)), H2ErrorCode.FRAME_SIZE_ERROR, id="half-a-reset"),
        pytest.param(frame(h2_frames.SETTINGS, 0, 1), H2ErrorCode.PROTOCOL_ERROR, id="settings-of-a-stream"),
        pytest.param(frame(h2_frames.SETTINGS, 0, 0, b"x"), H2ErrorCode.FRAME_SIZE_ERROR, id="half-a-setting"),
        pytest.param(
            frame(h2_frames.SETTINGS, ACK, 0, bytes(6)), H2ErrorCode.FRAME_SIZE_ERROR, id="a-full-acknowledgement"
        ),
        pytest.param(
            frame(h2_frames.SETTINGS, 0, 0, first_window(2**31)),
            H2ErrorCode.FLOW_CONTROL_ERROR,
            id="too-wide-a-first-window",
        ),
        pytest.param(
            frame(h2_frames.SETTINGS, 0, 0, b"\0\5\0\0\0\1"), H2ErrorCode.PROTOCOL_ERROR, id="frames-of-one-byte"
        ),
        pytest.param(frame(h2_frames.SETTINGS, 0, 0, b"\0\2\0\0\0\2"), H2ErrorCode.PROTOCOL_ERROR, id="push-two"),
        pytest.param(frame(h2_frames.PUSH_PROMISE, 0, 1, bytes(4)), H2ErrorCode.PROTOCOL_ERROR, id="a-promise"),
        pytest.param(frame(h2_frames.PING, 0, 0, bytes(7)), H2ErrorCode.FRAME_SIZE_ERROR, id="a-short-ping"),
        pytest.param(frame(h2_frames.PING, 0, 1, bytes(8)), H2ErrorCode.PROTOCOL_ERROR, id="a-ping-of-a-stream"),
        pytest.param(h2_frames.window_update(0, 0), H2ErrorCode.PROTOCOL_ERROR, id="a-window-widened-by-nothing"),
        pytest.param(
            h2_frames.window_update(0, 2**31 - 1), H2ErrorCode.FLOW_CONTROL_ERROR, id="a-window-beyond-all-windows"
        ),
        pytest.param(h2_frames.window_update(1, 1), H2ErrorCode.PROTOCOL_ERROR, id="the-window-of-no-stream"),
        pytest.param(
            h2_frames.head(h2_frames.DATA, 0, 1, 2**17 + 1), H2ErrorCode.FRAME_SIZE_ERROR, id="too-large-a-frame"
        ),
    ],
)
async def test_what_ends_the_connection(sent: bytes, code: H2ErrorCode) -> None:
    talk = Talk().say(sent, b"\0" * 100)
    assert talk.farewell() == (0, code)
    assert talk.wire.closed


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", id="http-1"),
        pytest.param(h2_frames.PREFACE + frame(h2_frames.PING, 0, 0, bytes(8)), id="a-ping-before-the-settings"),
        pytest.param(h2_frames.PREFACE + frame(h2_frames.SETTINGS, ACK), id="an-acknowledgement-before-the-settings"),
    ],
)
async def test_a_begin_that_is_none(sent: bytes) -> None:
    talk = Talk()
    hear(talk.connection, sent)
    assert talk.farewell() == (0, H2ErrorCode.PROTOCOL_ERROR)
    assert talk.wire.closed


@examples(300)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6), st.booleans())
async def test_a_spoilt_conversation_raises_nothing_and_asks_nothing_twice(
    spots: list[tuple[int, int]], cuts: bool
) -> None:
    """Bytes of a good one are replaced or left out."""
    listener = Echo()
    talk = Talk(listener, settings=first_window(20))
    parts = [talk.post(1, b"one"), frame(h2_frames.PING, 0, 0, bytes(8)), talk.post(3, b"x" * 50), talk.headed(5)]
    parts += [
        h2_frames.window_update(3, 100),
        frame(h2_frames.DATA, END_STREAM, 5, b"12345"),
        h2_frames.reset(3, H2ErrorCode.CANCEL),
    ]
    said = bytearray(talk.begin() + b"".join(parts))
    for where, what in spots:
        at = where % len(said)
        said[at : at + 1] = b"" if cuts else bytes((what,))
    hear(talk.connection, bytes(said))
    talk.frames()
    assert len(listener.asked) <= 3
    talk.connection.sweep(SLOW + 1)
    talk.connection.connection_lost(None)


@examples(300)
@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 255), st.integers(0, 5), st.binary(max_size=40))))
async def test_nonsense_raises_nothing(sent: list[tuple[int, int, int, bytes]]) -> None:
    talk = Talk().say(b"".join(frame(*one) for one in sent))
    talk.frames()
    talk.connection.connection_lost(None)
