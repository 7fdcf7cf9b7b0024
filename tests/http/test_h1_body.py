"""Bodies of HTTP/1.1 messages: chunked, malformed, too large."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputile.http.h1_body import Body
from gputile.http.h1_head import Malformed
from tests.effort import examples


def test_a_chunked_body() -> None:
    body = Body(None, 100)
    assert body.take(bytearray(b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nTrailer: x\r\n\r\n"))
    assert body.content() == b"abcde"


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"x\r\n", id="no-size"),
        pytest.param(b"\r\n3\r\nabc\r\n", id="an-empty-size"),
        pytest.param(b"-1\r\n", id="a-negative-size"),
        pytest.param(b"1\r\nabc\r\n", id="longer-than-its-size"),
        pytest.param(b"1" * 5000, id="an-endless-line"),
        pytest.param(b"\x0b3\r\nabc\r\n", id="a-size-after-a-vertical-tab"),
        pytest.param(b"0x3\r\nabc\r\n", id="a-size-with-a-prefix"),
        pytest.param(b"1" * 17 + b"\r\n", id="a-size-of-17-digits"),
        pytest.param(b"3;a\nb\r\nabc\r\n", id="a-bare-LF-after-the-size"),
        pytest.param(b"3;a=" + b"b" * 70_000, id="an-endless-extension"),
        pytest.param(b"3;a=\xc3\xa9\r\nabc\r\n", id="an-extension-that-is-not-ascii"),
        pytest.param(b"3\nabc\r\n", id="a-bare-LF-for-a-line-end"),
        pytest.param(b"3\r\nabc\n0\r\n\r\n", id="a-bare-LF-after-the-data"),
        pytest.param(b"0\r\nContent-Length: 5\r\n\r\n", id="a-length-in-a-trailer"),
        pytest.param(b"0\r\nno header\r\n\r\n", id="a-malformed-trailer"),
        pytest.param(b"0\r\nA: \x00\r\n\r\n", id="a-zero-in-a-trailer"),
        pytest.param(b"0\r\n" + b"A: b\r\n" * 20_000, id="endless-trailers"),
    ],
)
def test_malformed_chunks(sent: bytes) -> None:
    with pytest.raises(Malformed):
        Body(None, 100).take(bytearray(sent))


def test_a_body_beyond_the_limit_is_counted_and_dropped() -> None:
    body = Body(11, 10)
    assert not body.take(bytearray(b"0123456789"))
    assert body.take(bytearray(b"!"))
    assert (body.is_too_large, body.content()) == (True, b"")


def test_pieces_as_they_arrive() -> None:
    body = Body(None, 100)
    received = []
    for sent in (b"3\r\nab", b"c\r\n2\r\nde", b"\r\n0\r\n\r\n"):
        body.take(bytearray(sent))
        received.append((body.held, body.pieces()))
    assert received == [(2, b"ab"), (3, b"cde"), (0, b"")]


@examples(200)
@given(
    st.lists(st.sampled_from([b"\r\n", b"\r\n\r\n", b"0\r\n\r\n", b"a", b"\r", b"}\n"]), max_size=6),
    st.sampled_from([b"", b"A: b\r\n", b"A: b\r\nC:\r\n"]),
    st.sampled_from([b"", b"GET / HTTP/1.1\r\n\r\n", b"\r\n", b"0\r\n\r\n"]),
    st.lists(st.integers(0, 200), max_size=12),
)
def test_a_chunked_body_in_any_pieces_leaves_the_bytes_after_it(
    data: list[bytes], trailers: bytes, after: bytes, cuts: list[int]
) -> None:
    chunks = b"".join(b"%x;a=b\r\n%b\r\n" % (len(part), part) for part in data)
    sent = chunks + b"0\r\n" + trailers + b"\r\n"
    body, buffer, received = Body(None, 1000), bytearray(), b""
    edges = sorted({0, len(sent), *(cut % len(sent) for cut in cuts)})
    for start, end in pairwise(edges):
        buffer += sent[start:end] + (after if end == len(sent) else b"")
        assert body.take(buffer) is (end == len(sent))
        received += body.pieces()
    assert (received, bytes(buffer)) == (b"".join(data), after)


def test_a_line_of_a_stream_is_not_held_back() -> None:
    """A watch event ends with a line feed; the CR LF of its chunk may be the last bytes for an hour."""
    body = Body(None, 100)
    body.take(bytearray(b"4\r\n{1}\n\r\n"))
    assert body.pieces() == b"{1}\n"


def test_a_finished_body_takes_no_more() -> None:
    body, buffer = Body(None, 100), bytearray(b"0\r\n\r\nGET")
    assert body.take(buffer)
    assert body.take(buffer)
    assert buffer == b"GET"
