"""A body as it comes: in chunks, broken, too large."""

import pytest

from gputile.http.h1_body import Body, Malformed


def test_a_body_in_chunks() -> None:
    body = Body(None, 100)
    assert body.take(bytearray(b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nTrailer: x\r\n\r\n"))
    assert body.content() == b"abcde"


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"x\r\n", id="no-size"),
        pytest.param(b"\r\n", id="an-empty-size"),
        pytest.param(b"-1\r\n", id="a-negative-size"),
        pytest.param(b"1\r\nabc\r\n", id="longer-than-it-says"),
        pytest.param(b"1" * 5000, id="a-line-without-end"),
        pytest.param(b"\x0b3\r\nabc\r\n", id="a-size-behind-a-vertical-tab"),
        pytest.param(b"0x3\r\nabc\r\n", id="a-size-with-a-prefix"),
        pytest.param(b"1" * 13 + b"\r\n", id="a-size-beyond-all-sizes"),
        pytest.param(b"3;a\nb\r\nabc\r\n", id="a-line-feed-by-itself-behind-the-size"),
        pytest.param(b"0\r\nno header\r\n\r\n", id="a-trailer-that-is-no-header"),
        pytest.param(b"0\r\nA: \x00\r\n\r\n", id="a-zero-in-a-trailer"),
        pytest.param(b"0\r\n" + b"A: b\r\n" * 20_000, id="trailers-without-end"),
    ],
)
def test_chunks_that_are_none(sent: bytes) -> None:
    with pytest.raises(Malformed):
        Body(None, 100).take(bytearray(sent))


def test_what_is_too_large_is_counted_and_dropped() -> None:
    body = Body(11, 10)
    assert not body.take(bytearray(b"0123456789"))
    assert body.take(bytearray(b"!"))
    assert (body.is_too_large, body.content()) == (True, b"")


def test_pieces_as_they_come() -> None:
    body = Body(None, 100)
    found = []
    for sent in (b"3\r\nab", b"c\r\n2\r\nde", b"\r\n0\r\n\r\n"):
        body.take(bytearray(sent))
        found.append((body.held, body.pieces()))
    assert found == [(2, b"ab"), (3, b"cde"), (0, b"")]
