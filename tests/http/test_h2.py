"""HTTP/2 on the wire: concurrent streams, fragments, flow control, protocol errors."""

from itertools import pairwise

import pytest
from hyperframe.frame import DataFrame, SettingsFrame
from hypothesis import given
from hypothesis import strategies as st

from gputile.http import h2_frames, h2_server
from gputile.http.h2_frames import ACK, END_HEADERS, END_STREAM, PADDED, WITH_PRIORITY, H2ErrorCode, frame
from gputile.http.messages import LONGEST_HEAD, SLOW
from tests.effort import examples
from tests.http.raw_h2_client import Fields, RawH2Client, first_window
from tests.http.wire import Echo, receive

# ---- requests and responses -----------------------------------------------------------------------------------------


async def test_a_request_is_answered_in_the_turn_of_its_last_byte_and_in_one_write() -> None:
    client = RawH2Client().send()
    before = client.wire.writes
    client.send(client.post(1, b"hello"))
    assert client.answers() == {1: b"hello"}
    assert client.wire.writes == before + 1
    assert client.heads() == [{b":status": b"200", b"content-type": b"application/json", b"content-length": b"5"}]


async def test_the_first_frames_are_settings_a_large_window_and_an_ack() -> None:
    first, window, acknowledged = RawH2Client().send().frames()
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
async def test_fragmentation_does_not_change_the_responses(cuts: list[int]) -> None:
    client = RawH2Client(settings=first_window(70_000))
    padded = frame(h2_frames.DATA, END_STREAM | PADDED, 3, b"\x03two\0\0\0")
    parts = [
        client.post(1, b"one"),
        frame(h2_frames.PING, 0, 0, b"12345678"),
        client.headed(3, b"3"),
        frame(h2_frames.PRIORITY, 0, 3, b"\0\0\0\0\x10"),
        padded,
    ]
    block = client.block("/b?x=1", [(b"expect", b"100-continue")])
    parts += [
        frame(h2_frames.HEADERS, WITH_PRIORITY, 5, b"\0\0\0\0\x10" + block[:7]),
        frame(h2_frames.CONTINUATION, 0, 5),
        frame(h2_frames.CONTINUATION, END_HEADERS, 5, block[7:]),
        frame(0xFA, 0xFF, 5, b"unknown type"),
        frame(h2_frames.DATA, 0, 5, b"thr"),
        client.post(7, b"four"),
        frame(h2_frames.DATA, 0, 5, b"ee"),
        frame(h2_frames.HEADERS, END_HEADERS | END_STREAM, 5, client.raw([(b"trailer", b"1")])),
        frame(h2_frames.WINDOW_UPDATE, 0, 0, b"\0\0\1\0"),
    ]
    whole = client.begin() + b"".join(parts)
    for start, end in pairwise(sorted({0, len(whole), *(cut % len(whole) for cut in cuts)})):
        receive(client.connection, whole[start:end])
    assert client.answers() == {1: b"one", 3: b"two", 5: b"three", 7: b"four"}
    assert [request.path for request in client.listener.requests] == ["/a", "/a", "/a", "/b"]  # type: ignore[attr-defined]
    assert (client.resets(), client.goaway()) == ({}, None)


async def test_slow_responses_do_not_delay_others() -> None:
    listener = Echo()
    client = RawH2Client(listener).send()
    client.send(client.post(1, b"bind", "/wait"), client.post(3, b"bind too", "/wait"), client.post(5, b"filter"))
    assert client.answers() == {5: b"filter"}
    listener.gate.set()
    await listener.idle()
    assert client.answers() == {5: b"filter", 1: b"bind", 3: b"bind too"}


async def test_a_head_request_gets_content_length_and_no_body() -> None:
    client = RawH2Client().send()
    ask = [(b":method", b"HEAD"), (b":scheme", b"https"), (b":path", b"/healthz")]
    client.send(frame(h2_frames.HEADERS, END_HEADERS, 1, client.raw(ask)), frame(h2_frames.DATA, END_STREAM, 1, b"ok"))
    assert client.answers() == {1: b""}
    assert client.heads()[0][b"content-length"] == b"2"


async def test_a_caller_with_a_verified_certificate_is_known() -> None:
    listener = Echo()
    for known in (True, False):
        client = RawH2Client(listener, known=known)
        client.send(client.post(1))
    assert [request.is_known for request in listener.requests] == [True, False]


async def test_a_body_beyond_the_limit_is_dropped() -> None:
    listener = Echo(limit=10)
    client = RawH2Client(listener).send()
    client.send(client.post(1, b"0123456789"), client.post(3, b"0123456789!"))
    assert [(request.body, request.is_too_large) for request in listener.requests] == [
        (b"0123456789", False),
        (b"", True),
    ]


# ---- windows --------------------------------------------------------------------------------------------------------


async def test_a_response_waits_for_the_window_of_its_stream() -> None:
    client = RawH2Client(settings=first_window(4)).send()
    client.send(client.post(1, b"0123456789"), client.post(3, b"abc"))
    assert client.answers() == {3: b"abc"}
    client.send(h2_frames.window_update(1, 5))
    assert client.ended() == [3]
    client.send(h2_frames.window_update(1, 1))
    assert client.answers() == {3: b"abc", 1: b"0123456789"}


async def test_a_response_waits_for_the_window_of_the_connection() -> None:
    client = RawH2Client(Echo(limit=10**6), settings=first_window(10**6)).send()
    client.send(client.post(1, b"x" * 65_000), client.post(3, b"y" * 1000), client.post(5, b"z"))
    assert client.ended() == [1]
    client.send(h2_frames.window_update(3, 1000))
    assert client.ended() == [1], "the connection's window is the one that is used up"
    client.send(h2_frames.window_update(0, 466))
    assert client.answers() == {1: b"x" * 65_000, 3: b"y" * 1000, 5: b"z"}


async def test_a_new_initial_window_shifts_open_streams_even_below_zero() -> None:
    client = RawH2Client(settings=first_window(4)).send()
    client.send(client.post(1, b"0123456789"))
    client.send(frame(h2_frames.SETTINGS, payload=first_window(1)))  # -3
    client.send(h2_frames.window_update(1, 3))
    assert len(data_of(client)) == 4
    client.send(frame(h2_frames.SETTINGS, payload=first_window(7)))
    assert client.answers() == {1: b"0123456789"}


async def test_a_large_response_respects_the_clients_max_frame_size() -> None:
    client = RawH2Client(Echo(limit=10**6), settings=first_window(10**6)).send(h2_frames.window_update(0, 10**6))
    client.send(client.post(1, b"x" * 100_000))
    sizes = [len(sent.data) for sent in client.frames() if isinstance(sent, DataFrame)]
    assert (max(sizes), sum(sizes)) == (16384, 100_000)
    client.send(frame(h2_frames.SETTINGS, payload=h2_frames.SETTING.pack(h2_frames.MAX_FRAME_SIZE, 50_000)))
    client.send(client.post(3, b"x" * 100_000))
    assert max(len(sent.data) for sent in client.frames() if isinstance(sent, DataFrame)) == 50_000


async def test_our_window_is_replenished_before_it_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h2_server, "WINDOW", 100_000)
    client = RawH2Client(Echo(limit=10**6)).send()
    client.send(client.post(1, b"x" * 49_999))
    assert len(window_updates(client)) == 1
    client.send(
        frame(h2_frames.HEADERS, END_HEADERS, 3, client.block("/a", [])), frame(h2_frames.DATA, PADDED, 3, b"\0")
    )
    assert window_updates(client)[1:] == [50_000], "padding counts"


def window_updates(client: RawH2Client) -> list[int]:
    return [sent.window_increment for sent in client.frames() if sent.type == h2_frames.WINDOW_UPDATE]  # type: ignore[attr-defined]


def data_of(client: RawH2Client) -> bytes:
    return b"".join(sent.data for sent in client.frames() if isinstance(sent, DataFrame))


async def test_a_client_that_does_not_read_is_not_read() -> None:
    client = RawH2Client(Echo(limit=10**6)).send()
    client.connection.pause_writing()
    assert client.wire.paused
    client.send(client.post(1, b"already received"))
    assert client.ended() == []
    client.connection.resume_writing()
    assert client.answers() == {1: b"already received"}
    assert not client.wire.paused


# ---- protocol errors ------------------------------------------------------------------------------------------------

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
        pytest.param([*GOOD, (b":status", b"200")], id="a-pseudo-header-of-responses"),
        pytest.param([(b"accept", b"*/*"), *GOOD], id="a-pseudo-header-after-a-header"),
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
        pytest.param([*GOOD, (b"content-length", b"1")], id="a-length-without-a-body"),
    ],
)
async def test_a_malformed_request_is_reset_and_affects_no_other(fields: Fields) -> None:
    listener = Echo()
    client = RawH2Client(listener).send()
    client.send(frame(h2_frames.HEADERS, END_HEADERS | END_STREAM, 1, client.raw(fields)), client.post(3, b"x"))
    assert client.resets() == {1: H2ErrorCode.PROTOCOL_ERROR}
    assert client.answers() == {3: b"x"}
    assert len(listener.requests) == 1


async def test_a_body_that_differs_from_content_length() -> None:
    listener = Echo()
    client = RawH2Client(listener).send()
    client.send(client.headed(1), frame(h2_frames.DATA, 0, 1, b"123456"), frame(h2_frames.DATA, END_STREAM, 1, b"late"))
    client.send(client.headed(3), frame(h2_frames.DATA, END_STREAM, 3, b"1234"))
    assert client.resets() == {1: H2ErrorCode.PROTOCOL_ERROR, 3: H2ErrorCode.PROTOCOL_ERROR}
    assert listener.requests == []


async def test_frames_after_end_stream() -> None:
    listener = Echo()
    client = RawH2Client(listener).send()
    client.send(client.post(1, b"x", "/wait"), frame(h2_frames.DATA, 0, 1, b"more"))
    client.send(client.post(3, b"x"), frame(h2_frames.HEADERS, END_HEADERS | END_STREAM, 3, client.raw([])))
    assert client.resets() == {1: H2ErrorCode.STREAM_CLOSED, 3: H2ErrorCode.STREAM_CLOSED}
    listener.gate.set()
    await listener.idle()
    assert client.ended() == [3]


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        pytest.param(frame(h2_frames.DATA, 0, 0, b"x"), H2ErrorCode.PROTOCOL_ERROR, id="DATA-on-stream-0"),
        pytest.param(frame(h2_frames.DATA, 0, 1, b"x"), H2ErrorCode.PROTOCOL_ERROR, id="DATA-before-HEADERS"),
        pytest.param(
            frame(h2_frames.DATA, PADDED, 1, b"\x01"), H2ErrorCode.PROTOCOL_ERROR, id="padding-exceeds-the-payload"
        ),
        pytest.param(
            frame(h2_frames.HEADERS, END_HEADERS, 0, b"\x82"), H2ErrorCode.PROTOCOL_ERROR, id="HEADERS-on-stream-0"
        ),
        pytest.param(
            frame(h2_frames.HEADERS, END_HEADERS, 2, b"\x82"), H2ErrorCode.PROTOCOL_ERROR, id="an-even-stream"
        ),
        pytest.param(
            frame(h2_frames.HEADERS, WITH_PRIORITY, 1, b"\0"),
            H2ErrorCode.FRAME_SIZE_ERROR,
            id="truncated-priority-fields",
        ),
        pytest.param(
            frame(h2_frames.HEADERS, END_HEADERS, 1, b"\xff"),
            H2ErrorCode.COMPRESSION_ERROR,
            id="an-invalid-header-block",
        ),
        pytest.param(
            frame(h2_frames.CONTINUATION, 0, 1, b""), H2ErrorCode.PROTOCOL_ERROR, id="CONTINUATION-without-HEADERS"
        ),
        pytest.param(
            frame(h2_frames.HEADERS, 0, 1, b"\x82") + frame(h2_frames.PING, 0, 0, bytes(8)),
            H2ErrorCode.PROTOCOL_ERROR,
            id="a-frame-inside-a-header-block",
        ),
        pytest.param(
            frame(h2_frames.HEADERS, 0, 1, b"\x82") + frame(h2_frames.CONTINUATION, END_HEADERS, 3, b"\x87"),
            H2ErrorCode.PROTOCOL_ERROR,
            id="CONTINUATION-on-another-stream",
        ),
        pytest.param(
            frame(h2_frames.RST_STREAM, 0, 1, bytes(4)), H2ErrorCode.PROTOCOL_ERROR, id="RST_STREAM-of-an-idle-stream"
        ),
        pytest.param(
            frame(h2_frames.RST_STREAM, 0, 1, bytes(3)), H2ErrorCode.FRAME_SIZE_ERROR, id="a-truncated-RST_STREAM"
        ),
        pytest.param(frame(h2_frames.SETTINGS, 0, 1), H2ErrorCode.PROTOCOL_ERROR, id="SETTINGS-on-a-stream"),
        pytest.param(frame(h2_frames.SETTINGS, 0, 0, b"x"), H2ErrorCode.FRAME_SIZE_ERROR, id="a-truncated-SETTINGS"),
        pytest.param(
            frame(h2_frames.SETTINGS, ACK, 0, bytes(6)), H2ErrorCode.FRAME_SIZE_ERROR, id="SETTINGS-ACK-with-a-payload"
        ),
        pytest.param(
            frame(h2_frames.SETTINGS, 0, 0, first_window(2**31)),
            H2ErrorCode.FLOW_CONTROL_ERROR,
            id="an-initial-window-of-2^31",
        ),
        pytest.param(
            frame(h2_frames.SETTINGS, 0, 0, b"\0\5\0\0\0\1"), H2ErrorCode.PROTOCOL_ERROR, id="MAX_FRAME_SIZE-of-1"
        ),
        pytest.param(
            frame(h2_frames.SETTINGS, 0, 0, b"\0\2\0\0\0\2"), H2ErrorCode.PROTOCOL_ERROR, id="ENABLE_PUSH-of-2"
        ),
        pytest.param(
            frame(h2_frames.PUSH_PROMISE, 0, 1, bytes(4)), H2ErrorCode.PROTOCOL_ERROR, id="PUSH_PROMISE-from-a-client"
        ),
        pytest.param(frame(h2_frames.PING, 0, 0, bytes(7)), H2ErrorCode.FRAME_SIZE_ERROR, id="a-PING-of-7-bytes"),
        pytest.param(frame(h2_frames.PING, 0, 1, bytes(8)), H2ErrorCode.PROTOCOL_ERROR, id="PING-on-a-stream"),
        pytest.param(h2_frames.window_update(0, 0), H2ErrorCode.PROTOCOL_ERROR, id="WINDOW_UPDATE-of-0"),
        pytest.param(
            h2_frames.window_update(0, 2**31 - 1), H2ErrorCode.FLOW_CONTROL_ERROR, id="a-window-beyond-2^31-1"
        ),
        pytest.param(h2_frames.window_update(1, 1), H2ErrorCode.PROTOCOL_ERROR, id="WINDOW_UPDATE-of-an-idle-stream"),
        pytest.param(
            h2_frames.head(h2_frames.DATA, 0, 1, 2**17 + 1),
            H2ErrorCode.FRAME_SIZE_ERROR,
            id="a-frame-beyond-MAX_FRAME_SIZE",
        ),
    ],
)
async def test_connection_errors(sent: bytes, code: H2ErrorCode) -> None:
    client = RawH2Client().send(sent, b"\0" * 100)
    assert client.goaway() == (0, code)
    assert client.wire.closed


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", id="http-1"),
        pytest.param(h2_frames.PREFACE + frame(h2_frames.PING, 0, 0, bytes(8)), id="PING-before-SETTINGS"),
        pytest.param(h2_frames.PREFACE + frame(h2_frames.SETTINGS, ACK), id="SETTINGS-ACK-before-SETTINGS"),
    ],
)
async def test_an_invalid_connection_preface(sent: bytes) -> None:
    client = RawH2Client()
    receive(client.connection, sent)
    assert client.goaway() == (0, H2ErrorCode.PROTOCOL_ERROR)
    assert client.wire.closed


@examples(300)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6), st.booleans())
async def test_a_corrupted_conversation_raises_nothing_and_repeats_no_request(
    edits: list[tuple[int, int]], drops: bool
) -> None:
    """Bytes of a valid conversation are replaced or dropped."""
    listener = Echo()
    client = RawH2Client(listener, settings=first_window(20))
    parts = [client.post(1, b"one"), frame(h2_frames.PING, 0, 0, bytes(8)), client.post(3, b"x" * 50), client.headed(5)]
    parts += [
        h2_frames.window_update(3, 100),
        frame(h2_frames.DATA, END_STREAM, 5, b"12345"),
        h2_frames.reset(3, H2ErrorCode.CANCEL),
    ]
    sent = bytearray(client.begin() + b"".join(parts))
    for offset, value in edits:
        at = offset % len(sent)
        sent[at : at + 1] = b"" if drops else bytes((value,))
    receive(client.connection, bytes(sent))
    client.frames()
    assert len(listener.requests) <= 3
    client.connection.sweep(SLOW + 1)
    client.connection.connection_lost(None)


@examples(300)
@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 255), st.integers(0, 5), st.binary(max_size=40))))
async def test_random_frames_raise_nothing(sent: list[tuple[int, int, int, bytes]]) -> None:
    client = RawH2Client().send(b"".join(frame(*fields) for fields in sent))
    client.frames()
    client.connection.connection_lost(None)
