"""HPACK (RFC 7541), the header compression of HTTP/2: a complete decoder, and an encoder for our own responses.

The decoder has one dynamic table per connection. After `Malformed` that table is invalid, and so is the connection. The
encoder uses no dynamic table: a response has three headers, and a table that does not exist cannot get out of sync.
"""

from gputile.http.h1_body import Malformed
from gputile.http.huffman import huffman_decode

Field = tuple[bytes, bytes]

TABLE = 4096  # bytes of the dynamic table; the default of SETTINGS_HEADER_TABLE_SIZE
OVERHEAD = 32  # bytes that each entry counts beyond its text (section 4.1)
FURTHER = 4  # continuation bytes of an integer: up to a little more than 2**28
NO_TABLE = b"\x20"
"""Dynamic table size update to 0, sent once, at the start of our first header block: we never use the table."""

STATIC: tuple[Field, ...] = (
    (b"", b""),  # indices start at 1
    (b":authority", b""),
    (b":method", b"GET"),
    (b":method", b"POST"),
    (b":path", b"/"),
    (b":path", b"/index.html"),
    (b":scheme", b"http"),
    (b":scheme", b"https"),
    *((b":status", status) for status in (b"200", b"204", b"206", b"304", b"400", b"404", b"500")),
    (b"accept-charset", b""),
    (b"accept-encoding", b"gzip, deflate"),
    (b"accept-language", b""),
    (b"accept-ranges", b""),
    (b"accept", b""),
    (b"access-control-allow-origin", b""),
    (b"age", b""),
    (b"allow", b""),
    (b"authorization", b""),
    (b"cache-control", b""),
    (b"content-disposition", b""),
    (b"content-encoding", b""),
    (b"content-language", b""),
    (b"content-length", b""),
    (b"content-location", b""),
    (b"content-range", b""),
    (b"content-type", b""),
    (b"cookie", b""),
    (b"date", b""),
    (b"etag", b""),
    (b"expect", b""),
    (b"expires", b""),
    (b"from", b""),
    (b"host", b""),
    (b"if-match", b""),
    (b"if-modified-since", b""),
    (b"if-none-match", b""),
    (b"if-range", b""),
    (b"if-unmodified-since", b""),
    (b"last-modified", b""),
    (b"link", b""),
    (b"location", b""),
    (b"max-forwards", b""),
    (b"proxy-authenticate", b""),
    (b"proxy-authorization", b""),
    (b"range", b""),
    (b"referer", b""),
    (b"refresh", b""),
    (b"retry-after", b""),
    (b"server", b""),
    (b"set-cookie", b""),
    (b"strict-transport-security", b""),
    (b"transfer-encoding", b""),
    (b"user-agent", b""),
    (b"vary", b""),
    (b"via", b""),
    (b"www-authenticate", b""),
)
NAMED = {name: index for index, (name, _) in reversed(list(enumerate(STATIC)))}
WHOLE = {field: index for index, field in enumerate(STATIC)}


class HpackDecoder:
    """Decodes the header blocks of one connection, with its dynamic table."""

    def __init__(self, longest: int) -> None:
        """`longest`: the limit of the decoded size of a block, each field with its overhead."""
        self._longest = longest
        self._table: list[Field] = []  # the newest last
        self._size, self._limit = 0, TABLE

    def decode(self, block: bytes | bytearray) -> list[Field]:
        try:
            return self._decode(block)
        except IndexError:
            raise Malformed(400, "truncated header block") from None

    def _decode(self, block: bytes | bytearray) -> list[Field]:
        fields: list[Field] = []
        at = size = 0
        while at < len(block):
            first = block[at]
            if first & 0x80:  # indexed field (section 6.1)
                index, at = number(block, at, 0x7F)
                field = self._field(index)
            elif first & 0x40:  # literal with incremental indexing (section 6.2.1)
                field, at = self._literal(block, at, 0x3F)
                self._insert(field)
            elif first & 0x20:  # dynamic table size update (section 6.3)
                if fields:
                    raise Malformed(400, "dynamic table size update after the first header field")
                at = self._resize(block, at)
                continue
            else:  # literal without indexing, or never indexed (sections 6.2.2 and 6.2.3)
                field, at = self._literal(block, at, 0x0F)
            size += len(field[0]) + len(field[1]) + OVERHEAD
            if size > self._longest:
                raise Malformed(431, f"header list exceeds {self._longest} bytes")
            fields.append(field)
        return fields

    def _field(self, index: int) -> Field:
        if index < len(STATIC):
            if not index:
                raise Malformed(400, "header field index 0")
            return STATIC[index]
        back = index - len(STATIC) + 1
        if back > len(self._table):
            raise Malformed(400, "header field index beyond the dynamic table")
        return self._table[-back]

    def _literal(self, block: bytes | bytearray, at: int, mask: int) -> tuple[Field, int]:
        index, at = number(block, at, mask)
        if index:
            name = self._field(index)[0]
        else:
            name, at = _string(block, at)
        value, at = _string(block, at)
        return (name, value), at

    def _insert(self, field: Field) -> None:
        """The oldest entries are evicted; an entry larger than the table empties it (section 4.4)."""
        self._table.append(field)
        self._size += len(field[0]) + len(field[1]) + OVERHEAD
        self._shrink()

    def _resize(self, block: bytes | bytearray, at: int) -> int:
        self._limit, at = number(block, at, 0x1F)
        if self._limit > TABLE:
            raise Malformed(400, f"dynamic table size update exceeds {TABLE} bytes")
        self._shrink()
        return at

    def _shrink(self) -> None:
        evicted = 0
        while self._size > self._limit:
            name, value = self._table[evicted]
            self._size -= len(name) + len(value) + OVERHEAD
            evicted += 1
        if evicted:
            del self._table[:evicted]


def number(block: bytes | bytearray, at: int, mask: int) -> tuple[int, int]:
    """Decode an integer that starts in the low bits of a byte; return it and the position after it (section 5.1)."""
    value = block[at] & mask
    at += 1
    if value < mask:
        return value, at
    for shift in range(0, 7 * FURTHER, 7):
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise Malformed(400, "integer overflow in header block")


def _string(block: bytes | bytearray, at: int) -> tuple[bytes, int]:
    is_packed = block[at] & 0x80
    length, at = number(block, at, 0x7F)
    end = at + length
    if end > len(block):
        raise Malformed(400, "truncated header block")
    text = bytes(block[at:end])
    return (huffman_decode(text) if is_packed else text), end


# ---- writing --------------------------------------------------------------------------------------------------------


def encode_field(name: bytes, value: bytes) -> bytes:
    """Encode one field: by its index in the static table, else as a literal without indexing."""
    if (name, value) in WHOLE:
        return _number(WHOLE[name, value], 0x7F, 0x80)
    index = NAMED.get(name, 0)
    encoded = _number(index, 0x0F, 0) if index else b"\0" + _number(len(name), 0x7F, 0) + name
    return encoded + _number(len(value), 0x7F, 0) + value


def _number(value: int, mask: int, flags: int) -> bytes:
    if value < mask:
        return bytes((flags | value,))
    encoded, value = bytearray((flags | mask,)), value - mask
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
