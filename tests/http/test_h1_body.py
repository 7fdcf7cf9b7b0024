"""Bodies of HTTP/1.1 messages: chunked, malformed, too large."""

import pytest

from gputile.http.h1_body import Body, Malformed


def test_a_chunked_body() -> None:
    body = Body(None, 100)
    assert body.take(bytearray(b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nTrailer: x\r\n\r\n"))
    assert body.content() == b"abcde"


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"x\r\n", id="no-size"),
        pytest.param(b"\r\n", id="an-empty-size"),
        pytest.param(b"-1\r\n", id="a-negative-size"),
        pytest.param(b"1\r\nabc\r\n", id="longer-than-its-size"),
        pytest.param(b"1" * 5000, id="an-endless-line"),
        pytest.param(b"\x0b3\r\nabc\r\n", id="a-size-after-a-vertical-tab"),
        pytest.param(b"0x3\r\nabc\r\n", id="a-size-with-a-prefix"),
        pytest.param(b"1" * 13 + b"\r\n", id="a-size-of-13-digits"),
        pytest.param(b"3;a\nb\r\nabc\r\n", id="a-bare-LF-after-the-size"),
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
