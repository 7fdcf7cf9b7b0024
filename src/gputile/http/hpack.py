"""HPACK (RFC 7541): the headers of HTTP/2, which refer to those that came before.

Room:  one table per connection and direction. Everything asked is read; of writing, only what our answers need.
Door:  `HpackDecoder.decode(block)` gives the fields, `Malformed` where it can never be; `written` writes one field.

After an error the table is worthless, and so is the connection. We write without a table of our own: an answer has
three headers, and what need not be kept cannot be wrong.
"""

from gputile.http.h1_body import Malformed
from gputile.http.huffman import unpacked

Field = tuple[bytes, bytes]

TABLE = 4096  # bytes of fields that are kept for the other side; the size everybody starts with
OVERHEAD = 32  # bytes that each field is taken to need beyond its text (section 4.1)
FURTHER = 4  # bytes of a number after its first: up to 2**28 and a little
NO_TABLE = b"\x20"
"""Said once, at the begin of our first block: we shall never refer back, whatever table you would keep."""

STATIC: tuple[Field, ...] = (
    (b"", b""),  # indices begin with 1
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
    """The other side's table, and how to read what refers to it."""

    def __init__(self, longest: int) -> None:
        """`longest`: how much a block may unpack to, each field with its overhead."""
        self._longest = longest
        self._kept: list[Field] = []  # the newest last
        self._size, self._room = 0, TABLE

    def decode(self, block: bytes | bytearray) -> list[Field]:
        try:
            return self._decode(block)
        except IndexError:
            raise Malformed(400, "the headers end in the middle of one") from None

    def _decode(self, block: bytes | bytearray) -> list[Field]:
        found: list[Field] = []
        at = size = 0
        while at < len(block):
            first = block[at]
            if first & 0x80:  # a field as it was before (section 6.1)
                index, at = number(block, at, 0x7F)
                field = self._field(index)
            elif first & 0x40:  # a new one, to be kept (section 6.2.1)
                field, at = self._literal(block, at, 0x3F)
                self._keep(field)
            elif first & 0x20:  # how large a table the other side wants (section 6.3)
                if found:
                    raise Malformed(400, "the table of headers changes in the middle of them")
                at = self._resize(block, at)
                continue
            else:  # a new one, not to be kept (sections 6.2.2 and 6.2.3)
                field, at = self._literal(block, at, 0x0F)
            size += len(field[0]) + len(field[1]) + OVERHEAD
            if size > self._longest:
                raise Malformed(431, "the headers are too long")
            found.append(field)
        return found

    def _field(self, index: int) -> Field:
        if index < len(STATIC):
            if not index:
                raise Malformed(400, "a header without a number")
            return STATIC[index]
        back = index - len(STATIC) + 1
        if back > len(self._kept):
            raise Malformed(400, "a header refers to one that is not kept")
        return self._kept[-back]

    def _literal(self, block: bytes | bytearray, at: int, mask: int) -> tuple[Field, int]:
        index, at = number(block, at, mask)
        if index:
            name = self._field(index)[0]
        else:
            name, at = _string(block, at)
        value, at = _string(block, at)
        return (name, value), at

    def _keep(self, field: Field) -> None:
        """The oldest make room; one that is larger than the whole table empties it (section 4.4)."""
        self._kept.append(field)
        self._size += len(field[0]) + len(field[1]) + OVERHEAD
        self._shrink()

    def _resize(self, block: bytes | bytearray, at: int) -> int:
        self._room, at = number(block, at, 0x1F)
        if self._room > TABLE:
            raise Malformed(400, "a larger table of headers than we keep")
        self._shrink()
        return at

    def _shrink(self) -> None:
        gone = 0
        while self._size > self._room:
            name, value = self._kept[gone]
            self._size -= len(name) + len(value) + OVERHEAD
            gone += 1
        if gone:
            del self._kept[:gone]


def number(block: bytes | bytearray, at: int, mask: int) -> tuple[int, int]:
    """A number that begins in the low bits of a byte, and where it ends (section 5.1)."""
    found = block[at] & mask
    at += 1
    if found < mask:
        return found, at
    for shift in range(0, 7 * FURTHER, 7):
        byte = block[at]
        at += 1
        found += (byte & 0x7F) << shift
        if byte < 0x80:
            return found, at
    raise Malformed(400, "a number in the headers is too long")


def _string(block: bytes | bytearray, at: int) -> tuple[bytes, int]:
    is_packed = block[at] & 0x80
    length, at = number(block, at, 0x7F)
    end = at + length
    if end > len(block):
        raise Malformed(400, "the headers end in the middle of one")
    text = bytes(block[at:end])
    return (unpacked(text) if is_packed else text), end


# ---- writing --------------------------------------------------------------------------------------------------------


def written(name: bytes, value: bytes) -> bytes:
    """One field of ours: by its number where everybody knows it, else in full, and not to be kept."""
    if (name, value) in WHOLE:
        return _number(WHOLE[name, value], 0x7F, 0x80)
    index = NAMED.get(name, 0)
    said = _number(index, 0x0F, 0) if index else b"\0" + _number(len(name), 0x7F, 0) + name
    return said + _number(len(value), 0x7F, 0) + value


def _number(value: int, mask: int, flags: int) -> bytes:
    if value < mask:
        return bytes((flags | value,))
    said, value = bytearray((flags | mask,)), value - mask
    while value >= 0x80:
        said.append(value & 0x7F | 0x80)
        value >>= 7
    said.append(value)
    return bytes(said)
