"""HPACK against the examples of its RFC, another implementation, and random bytes."""

import pytest
from hpack import Encoder
from hpack.hpack import Decoder as OtherDecoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hpack.table import HeaderTable
from hypothesis import given
from hypothesis import strategies as st

from gputile.http.h1_body import Malformed
from gputile.http.hpack import NO_TABLE, STATIC, TABLE, Field, HpackDecoder, encode_field, number
from gputile.http.huffman import codes, huffman_decode
from tests.effort import examples

LONGEST = 65536


def test_the_tables_of_the_rfc() -> None:
    """Compared with another implementation's tables."""
    assert STATIC[1:] == HeaderTable.STATIC_TABLE
    assert sorted(codes()) == [
        (symbol, code, length)
        for symbol, (code, length) in enumerate(zip(REQUEST_CODES, REQUEST_CODES_LENGTH, strict=True))
    ]


@pytest.mark.parametrize(
    ("sent", "mask", "want"),
    [
        pytest.param("0a", 0x1F, 10, id="c-1-1-10-in-5-bits"),
        pytest.param("1f9a0a", 0x1F, 1337, id="c-1-2-1337-in-5-bits"),
        pytest.param("2a", 0xFF, 42, id="c-1-3-42-at-an-octet-boundary"),
    ],
)
def test_integers(sent: str, mask: int, want: int) -> None:
    block = bytes.fromhex(sent)
    assert number(block, 0, mask) == (want, len(block))


@pytest.mark.parametrize(
    ("sent", "want"),
    [
        pytest.param(
            "400a637573746f6d2d6b65790d637573746f6d2d686561646572",
            (b"custom-key", b"custom-header"),
            id="c-2-1-a-literal-with-indexing",
        ),
        pytest.param(
            "040c2f73616d706c652f70617468", (b":path", b"/sample/path"), id="c-2-2-a-literal-without-indexing"
        ),
        pytest.param(
            "100870617373776f726406736563726574", (b"password", b"secret"), id="c-2-3-a-literal-never-indexed"
        ),
        pytest.param("82", (b":method", b"GET"), id="c-2-4-an-indexed-field"),
    ],
)
def test_one_field(sent: str, want: Field) -> None:
    assert HpackDecoder(LONGEST).decode(bytes.fromhex(sent)) == [want]


FIRST = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"www.example.com")]
SECOND = [*FIRST, (b"cache-control", b"no-cache")]
THIRD = [
    *((b":method", b"GET"), (b":scheme", b"https"), (b":path", b"/index.html"), (b":authority", b"www.example.com")),
    (b"custom-key", b"custom-value"),
]


@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param(
            (
                "828684410f7777772e6578616d706c652e636f6d",
                "828684be58086e6f2d6361636865",
                "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
            ),
            id="c-3-plain",
        ),
        pytest.param(
            (
                "828684418cf1e3c2e5f23a6ba0ab90f4ff",
                "828684be5886a8eb10649cbf",
                "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
            ),
            id="c-4-huffman",
        ),
    ],
)
def test_requests_that_use_the_dynamic_table(blocks: tuple[str, ...]) -> None:
    decoder = HpackDecoder(LONGEST)
    assert [decoder.decode(bytes.fromhex(block)) for block in blocks] == [FIRST, SECOND, THIRD]


def test_the_oldest_entries_are_evicted() -> None:
    """As in appendix C.6: a table of 256 bytes, too small for a fourth field of this size."""
    encoder, decoder = Encoder(), HpackDecoder(LONGEST)
    encoder.header_table_size = 256
    rounds = [[(b"name-%d" % n, b"v" * 40)] for n in (1, 2, 3, 4, 1, 4)]
    assert [decoder.decode(encoder.encode(fields)) for fields in rounds] == rounds


def test_a_field_larger_than_the_table_empties_it() -> None:
    decoder = HpackDecoder(LONGEST)
    decoder.decode(bytes.fromhex("400161" + "0162"))
    assert decoder.decode(b"\xbe") == [(b"a", b"b")]
    decoder.decode(b"\x40\x01a\x7f\x81\x1f" + b"v" * 4096)
    with pytest.raises(Malformed, match="beyond the dynamic table"):
        decoder.decode(b"\xbe")


names = st.text("abcdefghijklmnopqrstuvwxyz-:", min_size=1, max_size=20).map(str.encode)
fields = st.lists(
    st.tuples(names | st.sampled_from([name for name, _ in STATIC[1:]]), st.binary(max_size=60)), max_size=12
)


@examples(200)
@given(st.lists(st.tuples(fields, st.booleans(), st.integers(0, TABLE)), max_size=6))
def test_blocks_of_another_implementation_are_decoded(blocks: list[tuple[list[Field], bool, int]]) -> None:
    encoder, decoder = Encoder(), HpackDecoder(LONGEST)
    for sent, huffman, size in blocks:
        encoder.header_table_size = size
        assert decoder.decode(encoder.encode(sent, huffman=huffman)) == sent


@examples(100)
@given(fields)
def test_another_implementation_decodes_our_blocks(sent: list[Field]) -> None:
    decoder = OtherDecoder()
    decoder.max_allowed_table_size = 0
    block = NO_TABLE + b"".join(encode_field(name, value) for name, value in sent)
    assert [(field[0], field[1]) for field in decoder.decode(block, raw=True)] == sent


@examples(500)
@given(st.lists(st.binary(max_size=60), max_size=4))
def test_random_blocks_are_malformed_or_valid(blocks: list[bytes]) -> None:
    decoder = HpackDecoder(LONGEST)
    for block in blocks:
        try:
            decoder.decode(block)
        except Malformed:
            break


@examples(300)
@given(st.binary(max_size=40))
def test_random_huffman_strings_are_malformed_or_valid(packed: bytes) -> None:
    try:
        huffman_decode(packed)
    except Malformed:
        return


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        pytest.param(b"\x80", "index 0", id="index-0"),
        pytest.param(b"\xbe", "beyond the dynamic table", id="a-field-index-beyond-the-table"),
        pytest.param(b"\x7e\x00", "beyond the dynamic table", id="a-name-index-beyond-the-table"),
        pytest.param(b"\x40\x05ab", "truncated", id="a-truncated-name"),
        pytest.param(b"\x41", "truncated", id="a-name-without-a-value"),
        pytest.param(b"\xff\xff\xff\xff\xff\x01", "integer overflow", id="an-endless-integer"),
        pytest.param(b"\x3f\xe2\x1f", "size update exceeds 4096", id="a-table-of-4097-bytes"),
        pytest.param(b"\x82\x20", "after the first header field", id="a-size-update-after-a-field"),
        pytest.param(b"\x41\x81\x00", "invalid Huffman padding", id="huffman-padding-of-zeros"),
        pytest.param(b"\x41\x82\x07\xff", "invalid Huffman padding", id="huffman-padding-of-a-whole-byte"),
        pytest.param(b"\x41\x84\xff\xff\xff\xff", "invalid Huffman code", id="a-huffman-EOS"),
    ],
)
def test_malformed_blocks(sent: bytes, reason: str) -> None:
    with pytest.raises(Malformed, match=reason):
        HpackDecoder(LONGEST).decode(sent)


def test_a_header_bomb_is_rejected() -> None:
    """One field of 4,000 bytes, and then many times its index."""
    decoder = HpackDecoder(LONGEST)
    decoder.decode(b"\x40\x01a\x7f\xa1\x1e" + b"v" * 4000)
    assert len(decoder.decode(b"\xbe" * 16)) == 16
    with pytest.raises(Malformed, match="header list exceeds"):
        decoder.decode(b"\xbe" * 17)
