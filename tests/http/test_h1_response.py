"""Heads of answers, and what is refused."""

import pytest

from gputile.http.h1_body import Malformed
from gputile.http.h1_response import UNTIL_CLOSE, read_head

OK = b"HTTP/1.1 200 OK"


@pytest.mark.parametrize(
    ("method", "lines", "want"),
    [
        pytest.param("GET", [OK, b"Content-Length: 12"], (200, 12, False), id="a-length"),
        pytest.param("GET", [OK, b"Transfer-Encoding: Chunked"], (200, None, False), id="chunks"),
        pytest.param("GET", [OK], (200, UNTIL_CLOSE, True), id="neither-lasts-until-the-end"),
        pytest.param("HEAD", [OK, b"Content-Length: 12"], (200, 0, False), id="head-has-no-body-whatever-it-says"),
        pytest.param("HEAD", [OK, b"Transfer-Encoding: chunked"], (200, 0, False), id="nor-has-head-chunks"),
        pytest.param("CONNECT", [OK], (200, 0, False), id="nor-has-a-tunnel"),
        pytest.param("GET", [b"HTTP/1.1 204 No Content"], (204, 0, False), id="nor-has-204"),
        pytest.param("GET", [b"HTTP/1.1 304 Not Modified", b"Content-Length: 9"], (304, 0, False), id="nor-has-304"),
        pytest.param("GET", [b"HTTP/1.1 100 Continue"], (100, 0, False), id="nor-has-1xx"),
        pytest.param("CONNECT", [b"HTTP/1.1 407 Who?", b"Content-Length: 3"], (407, 3, False), id="a-proxy-says-no"),
        pytest.param("GET", [b"HTTP/1.1 200", b"Content-Length: 0"], (200, 0, False), id="no-word-after-the-number"),
        pytest.param("GET", [OK, b"Content-Length: 0", b"Connection: Close"], (200, 0, True), id="it-closes"),
        pytest.param("GET", [b"HTTP/1.0 200 OK", b"Content-Length: 0"], (200, 0, True), id="1.0-closes"),
        pytest.param(
            "GET",
            [b"HTTP/1.0 200 OK", b"Content-Length: 0", b"Connection: keep-alive"],
            (200, 0, False),
            id="1.0-may-stay-too",
        ),
    ],
)
def test_heads(method: str, lines: list[bytes], want: tuple[object, ...]) -> None:
    found = read_head(b"\r\n".join(lines), method)
    assert (found.status, found.length, found.closes) == want


def test_headers_are_found_in_lower_case() -> None:
    found = read_head(OK + b"\r\nRetry-After:  7 \r\nX-A: b:c", "GET")
    assert found.headers == {"retry-after": "7", "x-a": "b:c"}


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param([b"hello"], id="no-http"),
        pytest.param([b"HTTP/2.0 200 OK"], id="another-version"),
        pytest.param([b"HTTP/1.1 OK"], id="no-status"),
        pytest.param([b"HTTP/1.1 2000 OK"], id="a-status-of-four-digits"),
        pytest.param([b"HTTP/1.1 -20 OK"], id="a-negative-status"),
        pytest.param([OK, b"no colon"], id="no-header"),
        pytest.param([OK, b" folded: 1"], id="a-folded-header"),
        pytest.param([OK, b"Content-Length : 1"], id="a-space-before-the-colon"),
        pytest.param([OK, b"Content-Length: -1"], id="a-negative-length"),
        pytest.param([OK, b"Content-Length: " + b"9" * 40], id="an-endless-length"),
        pytest.param([OK, b"Content-Length: 1", b"content-length: 2"], id="two-lengths"),
        pytest.param([OK, b"Content-Length: 1", b"Transfer-Encoding: chunked"], id="a-length-and-chunks"),
        pytest.param([OK, b"Transfer-Encoding: gzip, chunked"], id="another-encoding"),
        pytest.param([OK, b"Transfer-Encoding: \x0bchunked"], id="chunked-behind-a-vertical-tab"),
        pytest.param([OK, b"Transfer-Encoding:", b"Content-Length: 1"], id="an-empty-encoding-and-a-length"),
        pytest.param([b"HTTP/1.0 200 OK", b"Transfer-Encoding: chunked"], id="chunks-in-1.0"),
        pytest.param([OK, b"A: b\nB: c"], id="a-line-feed-by-itself"),
        pytest.param([OK, b"A: \x00"], id="a-zero-in-a-value"),
        pytest.param([OK, b"A b: c"], id="a-space-in-a-name"),
    ],
)
def test_what_is_refused_and_not_guessed(lines: list[bytes]) -> None:
    with pytest.raises(Malformed):
        read_head(b"\r\n".join(lines), "GET")
