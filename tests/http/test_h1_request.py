"""Heads of requests: what is accepted, and what is rejected because two parsers could read it differently."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputile.http.h1_head import Malformed
from gputile.http.h1_request import RequestHead, check_begun, read_head
from gputile.http.h1_server import H1Connection
from tests.effort import examples
from tests.http.wire import Echo, Wire, receive

POST = b"POST /gputile/filter HTTP/1.1"
HOST = b"Host: gputile.kube-system.svc:443"


def head(*lines: bytes) -> RequestHead:
    return read_head(b"\r\n".join([*lines, b"", b""]))


@pytest.mark.parametrize(
    ("lines", "want"),
    [
        pytest.param([POST, HOST, b"content-length: 12"], ("POST", "/gputile/filter", 12, False), id="a-length"),
        pytest.param(
            [POST, HOST, b"Transfer-Encoding: Chunked"], ("POST", "/gputile/filter", None, False), id="chunks"
        ),
        pytest.param([b"GET /healthz?x=1 HTTP/1.1", HOST], ("GET", "/healthz", 0, False), id="a-query"),
        pytest.param([b"GET /a%20b HTTP/1.1", HOST], ("GET", "/a%20b", 0, False), id="an-encoded-path"),
        pytest.param([b'GET /a?b="c"&d={|} HTTP/1.1', HOST], ("GET", "/a", 0, False), id="a-query-with-quotes"),
        pytest.param([b"GET http://h:1/readyz HTTP/1.1", HOST], ("GET", "/readyz", 0, False), id="absolute-form"),
        pytest.param([b"GET / HTTP/1.1", HOST, b"Connection: close"], ("GET", "/", 0, True), id="closes"),
        pytest.param([b"GET / HTTP/1.1", HOST, b"Connection: a, Close"], ("GET", "/", 0, True), id="closes-in-a-list"),
        pytest.param(
            [b"GET / HTTP/1.1", HOST, b"Connection: close", b"Connection: te"], ("GET", "/", 0, True), id="closes-once"
        ),
        pytest.param([b"GET / HTTP/1.1", HOST, b"Connection: not-close"], ("GET", "/", 0, False), id="keeps"),
        pytest.param([b"GET / HTTP/1.0"], ("GET", "/", 0, True), id="1.0-closes-and-needs-no-host"),
        pytest.param([b"GET / HTTP/1.0", b"Connection: keep-alive"], ("GET", "/", 0, False), id="1.0-with-keep-alive"),
        pytest.param([b"GET / HTTP/1.1", b"Host:"], ("GET", "/", 0, False), id="an-empty-host"),
        pytest.param([b"GET / HTTP/1.1", b"Host: [::1]:12345"], ("GET", "/", 0, False), id="an-IPv6-host"),
        pytest.param([POST, HOST, b"A:\t b \t"], ("POST", "/gputile/filter", 0, False), id="spaces-around-a-value"),
        pytest.param([POST, HOST, b"A: \xc3\xa9"], ("POST", "/gputile/filter", 0, False), id="a-value-in-utf-8"),
        pytest.param(
            [POST, HOST, b"Connection: Upgrade", b"Upgrade: h2c", b"Content-Length: 3"],
            ("POST", "/gputile/filter", 3, False),
            id="an-upgrade-is-ignored",
        ),
        pytest.param([b"CONNECT /a HTTP/1.1", HOST], ("CONNECT", "/a", 0, False), id="CONNECT-to-a-path"),
        pytest.param([POST, HOST, b"A:", b"B: c"], ("POST", "/gputile/filter", 0, False), id="an-empty-value-first"),
        pytest.param([POST, HOST, b"A:"], ("POST", "/gputile/filter", 0, False), id="an-empty-value"),
    ],
)
def test_heads(lines: list[bytes], want: tuple[object, ...]) -> None:
    parsed = head(*lines)
    assert (parsed.method, parsed.path, parsed.length, parsed.closes) == want


def test_values_are_stripped() -> None:
    assert head(POST, HOST, b"X-Remote-User:\t  jane \t").fields[1] == (b"x-remote-user", b"jane")


REJECTED = [
    pytest.param([b"hello"], 400, id="not-HTTP"),
    pytest.param([b""], 400, id="nothing"),
    pytest.param([b"GET / HTTP/2.0", HOST], 505, id="another-version"),
    pytest.param([b"GET / HTTP/1.2", HOST], 505, id="a-future-version"),
    pytest.param([b"GET / HTTP/1.1x", HOST], 400, id="text-after-the-version"),
    pytest.param([b"GET / HTTP/1.", HOST], 400, id="half-a-version"),
    pytest.param([b"GET / http/1.1", HOST], 400, id="a-version-in-lower-case"),
    pytest.param([b"GET  / HTTP/1.1", HOST], 400, id="two-spaces-in-the-request-line"),
    pytest.param([b"GET\t/ HTTP/1.1", HOST], 400, id="a-tab-in-the-request-line"),
    pytest.param([b" GET / HTTP/1.1", HOST], 400, id="a-space-before-the-method"),
    pytest.param([b"GET /", HOST], 400, id="no-version"),
    pytest.param([b"G@T / HTTP/1.1", HOST], 400, id="a-method-that-is-not-a-token"),
    pytest.param([b"G\x00T / HTTP/1.1", HOST], 400, id="a-zero-in-the-method"),
    pytest.param([b"BREW / HTTP/1.1", HOST], 400, id="an-unknown-method"),
    pytest.param([b"OPTIONS / RTSP/1.0", HOST], 400, id="another-protocol"),
    pytest.param([b"GET /  HTTP/1.1", HOST], 400, id="two-spaces-before-the-version"),
    pytest.param([b"GET / HTTP/0.9", HOST], 505, id="a-version-of-the-past"),
    pytest.param([b"PRI * HTTP/2.0", b"", b"SM"], 400, id="the-preface-of-HTTP/2"),
    pytest.param([b"GET healthz HTTP/1.1", HOST], 400, id="a-target-without-a-slash"),
    pytest.param([b"GET * HTTP/1.1", HOST], 400, id="a-star-as-the-target"),
    pytest.param([b"CONNECT a:1 HTTP/1.1", HOST], 400, id="a-target-for-proxies"),
    pytest.param([b"GET ftp://h/ HTTP/1.1", HOST], 400, id="another-scheme"),
    pytest.param([b"GET http:///healthz HTTP/1.1", HOST], 400, id="an-absolute-form-without-a-host"),
    pytest.param([b"GET /a\x01b HTTP/1.1", HOST], 400, id="a-control-character-in-the-target"),
    pytest.param([b"GET /\xc3\xa9 HTTP/1.1", HOST], 400, id="a-target-that-is-not-ascii"),
    pytest.param([b"GET /%zz HTTP/1.1", HOST], 400, id="an-invalid-percent-encoding"),
    pytest.param([b"GET /a#b HTTP/1.1", HOST], 400, id="a-target-with-a-fragment"),
    pytest.param([b'GET /a"b HTTP/1.1', HOST], 400, id="a-path-with-a-quote"),
    pytest.param([POST, HOST, b"no colon"], 400, id="no-header"),
    pytest.param([POST, HOST, b": value"], 400, id="a-header-without-a-name"),
    pytest.param([POST, HOST, b" folded: 1"], 400, id="a-folded-header"),
    pytest.param([POST, HOST, b"A: 1", b"\tfolded"], 400, id="a-folded-value"),
    pytest.param([POST, HOST, b"Content-Length : 1"], 400, id="a-space-before-the-colon"),
    pytest.param([POST, HOST, b"Content Length: 1"], 400, id="a-space-in-a-name"),
    pytest.param([POST, HOST, b"A\x00: 1"], 400, id="a-zero-in-a-name"),
    pytest.param([POST, HOST, b"A\xe9: 1"], 400, id="a-name-that-is-not-ascii"),
    pytest.param([POST, HOST, b"A(b): 1"], 400, id="a-bracket-in-a-name"),
    pytest.param([POST, HOST, b"A: b\x00c"], 400, id="a-zero-in-a-value"),
    pytest.param([POST, HOST, b"A: b\x0bc"], 400, id="a-vertical-tab-in-a-value"),
    pytest.param([POST, HOST, b"A: b\x7f"], 400, id="a-delete-in-a-value"),
    pytest.param([POST, HOST, b"A: \x1b[31m"], 400, id="an-escape-in-a-value"),
    pytest.param([POST, HOST, b"A: b\nB: c"], 400, id="a-bare-LF-in-a-value"),
    pytest.param([POST, HOST, b"A: b\rB: c"], 400, id="a-bare-CR-in-a-value"),
    pytest.param([POST, HOST, b"Content-Length:"], 400, id="an-empty-length"),
    pytest.param([POST, HOST, b"Content-Length: -1"], 400, id="a-negative-length"),
    pytest.param([POST, HOST, b"Content-Length: +1"], 400, id="a-length-with-a-sign"),
    pytest.param([POST, HOST, b"Content-Length: 1e3"], 400, id="a-length-that-is-not-a-number"),
    pytest.param([POST, HOST, b"Content-Length: 5, 5"], 400, id="a-list-of-lengths"),
    pytest.param([POST, HOST, b"Content-Length: \x0b5"], 400, id="a-length-after-a-vertical-tab"),
    pytest.param([POST, HOST, b"Content-Length: " + b"9" * 40], 400, id="an-endless-length"),
    pytest.param([POST, HOST, b"Content-Length: 1", b"content-length: 2"], 400, id="two-lengths"),
    pytest.param([POST, HOST, b"Content-Length: 1", b"content-length: 1"], 400, id="the-same-length-twice"),
    pytest.param([POST, HOST, b"Content-Length: 1", b"Transfer-Encoding: chunked"], 400, id="a-length-and-chunks"),
    pytest.param([POST, HOST, b"Content-Length: 1", b"Transfer-Encoding:"], 400, id="a-length-and-an-empty-encoding"),
    pytest.param([POST, HOST, b"Transfer-Encoding:", b"Content-Length: 1"], 400, id="an-empty-encoding-and-a-length"),
    pytest.param([POST, HOST, b"Transfer-Encoding:"], 400, id="an-empty-encoding"),
    pytest.param([POST, HOST, b"Transfer-Encoding: gzip, chunked"], 400, id="another-encoding"),
    pytest.param([POST, HOST, b"Transfer-Encoding: \x0bchunked"], 400, id="chunked-after-a-vertical-tab"),
    pytest.param([POST, HOST, b"Transfer-Encoding: chunked\x0c"], 400, id="chunked-before-a-form-feed"),
    pytest.param([POST, HOST, b"Transfer-Encoding: chunked", b"Transfer-Encoding: x"], 400, id="two-encodings"),
    pytest.param([POST, HOST, b"Transfer-Encoding: chunked, identity"], 400, id="another-coding-after-chunked"),
    pytest.param([b"POST / HTTP/1.0", b"Transfer-Encoding: chunked"], 400, id="chunks-in-1.0"),
    pytest.param([POST], 400, id="no-host"),
    pytest.param([POST, HOST, b"host: other"], 400, id="two-hosts"),
    pytest.param([POST, HOST, HOST], 400, id="the-same-host-twice"),
    pytest.param([b"GET / HTTP/1.0", HOST, HOST], 400, id="two-hosts-in-1.0"),
    pytest.param([POST, b"Host: a b"], 400, id="a-host-with-a-space"),
    pytest.param([POST, b"Host: a/b"], 400, id="a-host-with-a-path"),
    pytest.param([POST, b"Host: a@b"], 400, id="a-host-with-a-user"),
]


@pytest.mark.parametrize(("lines", "status"), REJECTED)
def test_ambiguous_heads_are_rejected(lines: list[bytes], status: int) -> None:
    with pytest.raises(Malformed) as caught:
        head(*lines)
    assert caught.value.status == status


@pytest.mark.parametrize(("lines", "status"), REJECTED)
async def test_an_ambiguous_head_gets_a_status_and_a_close(lines: list[bytes], status: int) -> None:
    """The same over a connection: bytes after such a head are never parsed as another request."""
    listener = Echo()
    connection, wire = H1Connection(listener), Wire()
    connection.connection_made(wire)
    receive(connection, b"\r\n".join([*lines, b"", b""]) + b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n")
    if lines == [b""]:  # empty lines before a request are skipped
        assert [request.path for request in listener.requests] == ["/smuggled"]
        return
    assert wire.sent.startswith(b"HTTP/1.1 %d " % status)
    assert (wire.closed, listener.requests) == (True, [])


@pytest.mark.parametrize(
    "begun",
    [
        pytest.param(b"GET / HTTP/1.1\nHost: x\n\n", id="lines-that-end-with-a-bare-LF"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\n", id="one-line-that-ends-with-a-bare-LF"),
        pytest.param(b"GET / HTTP/1.1\rHost: x\r\r", id="lines-that-end-with-a-bare-CR"),
    ],
)
async def test_bare_line_ends_are_rejected_at_once(begun: bytes) -> None:
    connection, wire = H1Connection(Echo()), Wire()
    connection.connection_made(wire)
    receive(connection, begun)
    assert wire.sent.startswith(b"HTTP/1.1 400 ")
    assert wire.closed


@examples(200)
@given(
    st.lists(st.sampled_from([b"GET /", b" HTTP/1.1", b"\r", b"\n", b"\r\n", b"A: b", b":", b" ", b"\x00", b"Host: x"]))
)
def test_an_accepted_head_is_unambiguous(pieces: list[bytes]) -> None:
    head_bytes = b"".join(pieces).partition(b"\r\n\r\n")[0]
    try:
        check_begun(head_bytes)
        parsed = read_head(head_bytes + b"\r\n\r\n")
    except Malformed:
        return
    assert parsed.path.startswith("/")
    assert sum(name == b"host" for name, _ in parsed.fields) == 1
    assert all(name and not set(value) & set(b"\r\n\x00") for name, value in parsed.fields)
    assert len(parsed.fields) == head_bytes.count(b"\r\n") == head_bytes.count(b"\n") == head_bytes.count(b"\r")
