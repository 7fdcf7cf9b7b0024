"""Heads of responses: what is accepted, and what is rejected."""

import pytest

from gputile.http.h1_head import Malformed
from gputile.http.h1_response import UNTIL_CLOSE, read_head

OK = b"HTTP/1.1 200 OK"


@pytest.mark.parametrize(
    ("method", "lines", "want"),
    [
        pytest.param("GET", [OK, b"Content-Length: 12"], (200, 12, False), id="a-length"),
        pytest.param("GET", [OK, b"Transfer-Encoding: Chunked"], (200, None, False), id="chunks"),
        pytest.param("GET", [OK], (200, UNTIL_CLOSE, True), id="neither-ends-with-the-connection"),
        pytest.param("HEAD", [OK, b"Content-Length: 12"], (200, 0, False), id="HEAD-has-no-body-despite-its-length"),
        pytest.param("HEAD", [OK, b"Transfer-Encoding: chunked"], (200, 0, False), id="HEAD-has-no-chunks"),
        pytest.param("CONNECT", [OK], (200, 0, False), id="a-tunnel-has-no-body"),
        pytest.param("GET", [b"HTTP/1.1 204 No Content"], (204, 0, False), id="204-has-no-body"),
        pytest.param(
            "GET", [b"HTTP/1.1 304 Not Modified", b"Content-Length: 9"], (304, 0, False), id="304-has-no-body"
        ),
        pytest.param("GET", [b"HTTP/1.1 100 Continue"], (100, 0, False), id="1xx-has-no-body"),
        pytest.param(
            "CONNECT", [b"HTTP/1.1 407 Who?", b"Content-Length: 3"], (407, 3, False), id="a-rejection-of-a-proxy"
        ),
        pytest.param("GET", [b"HTTP/1.1 200", b"Content-Length: 0"], (200, 0, False), id="no-reason-phrase"),
        pytest.param("GET", [OK, b"Content-Length: 0", b"Connection: Close"], (200, 0, True), id="it-closes"),
        pytest.param("GET", [b"HTTP/1.0 200 OK", b"Content-Length: 0"], (200, 0, True), id="1.0-closes"),
        pytest.param(
            "GET",
            [b"HTTP/1.0 200 OK", b"Content-Length: 0", b"Connection: keep-alive"],
            (200, 0, False),
            id="1.0-with-keep-alive",
        ),
    ],
)
def test_heads(method: str, lines: list[bytes], want: tuple[object, ...]) -> None:
    parsed = read_head(b"\r\n".join([*lines, b"", b""]), method)
    assert (parsed.status, parsed.length, parsed.closes) == want


def test_a_response_may_name_a_protocol_that_we_do_not_upgrade_to() -> None:
    parsed = read_head(OK + b"\r\nConnection: Upgrade\r\nUpgrade: h2\r\nContent-Length: 2\r\n\r\n", "GET")
    assert (parsed.length, parsed.closes) == (2, False)


def test_header_names_are_lower_case() -> None:
    parsed = read_head(OK + b"\r\nRetry-After:  7 \r\nX-A: b:c\r\n\r\n", "GET")
    assert parsed.headers == {b"retry-after": b"7", b"x-a": b"b:c"}


def test_the_values_of_a_repeated_name_are_joined() -> None:
    assert read_head(OK + b"\r\nVia: a\r\nvia: b\r\n\r\n", "GET").headers == {b"via": b"a,b"}


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param([b"hello"], id="not-HTTP"),
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
        pytest.param([OK, b"Transfer-Encoding: \x0bchunked"], id="chunked-after-a-vertical-tab"),
        pytest.param([OK, b"Transfer-Encoding:", b"Content-Length: 1"], id="an-empty-encoding-and-a-length"),
        pytest.param([b"HTTP/1.0 200 OK", b"Transfer-Encoding: chunked"], id="chunks-in-1.0"),
        pytest.param([OK, b"A: b\nB: c"], id="a-bare-LF"),
        pytest.param([OK + b"\r\r", b"A: b"], id="two-bare-CRs"),
        pytest.param([b"", OK], id="an-empty-line-first"),
        pytest.param([b"RTSP/1.0 200 OK"], id="another-protocol"),
        pytest.param([OK, b"A: b", b" folded"], id="a-folded-value"),
        pytest.param([OK, b"A: \x00"], id="a-zero-in-a-value"),
        pytest.param([OK, b"A b: c"], id="a-space-in-a-name"),
    ],
)
def test_ambiguous_heads_are_rejected(lines: list[bytes]) -> None:
    with pytest.raises(Malformed):
        read_head(b"\r\n".join([*lines, b"", b""]), "GET")
