"""Decodes the Huffman code of HPACK (RFC 7541, appendix B), a byte at a time.

The code is canonical: codes of one length follow each other in the order of their symbols, and the next length
continues where the last one ended. So the table of lengths defines the code. A step (a node of the tree and the next
byte) is computed when it is first needed, and cached: there are at most 65,536 of them, and headers use few.
"""

from collections.abc import Iterable, Iterator

from gputile.http.h1_body import Malformed

END = 256  # EOS; only a prefix of it may occur, as padding

BY_LENGTH: dict[int, Iterable[int]] = {  # symbols by the length of their code, in bits
    5: b"012aceiost",
    6: b" %-./3456789=A_bdfghlmnpru",
    7: b":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz",
    8: b"&*,;XZ",
    10: b'!"()?',
    11: b"'+|",
    12: b"#>",
    13: b"\0$@[]~",
    14: b"^}",
    15: b"<`{",
    19: (92, 195, 208),
    20: (128, 130, 131, 162, 184, 194, 224, 226),
    21: (153, 161, 167, 172, 176, 177, 179, 209, 216, 217, 227, 229, 230),
    22: (
        *(129, 132, 133, 134, 136, 146, 154, 156, 160, 163, 164, 169, 170, 173, 178, 181, 185, 186, 187, 189, 190),
        *(196, 198, 228, 232, 233),
    ),
    23: (
        *(1, 135, 137, 138, 139, 140, 141, 143, 147, 149, 150, 151, 152, 155, 157, 158, 165, 166, 168, 174, 175, 180),
        *(182, 183, 188, 191, 197, 231, 239),
    ),
    24: (9, 142, 144, 145, 148, 159, 171, 206, 215, 225, 236, 237),
    25: (199, 207, 234, 235),
    26: (192, 193, 200, 201, 202, 205, 210, 213, 218, 219, 238, 240, 242, 243, 255),
    27: (203, 204, 211, 212, 214, 221, 222, 223, 241, 244, 245, 246, 247, 248, 250, 251, 252, 253, 254),
    28: (2, 3, 4, 5, 6, 7, 8, 11, 12, *range(14, 22), *range(23, 32), 127, 220, 249),
    30: (10, 13, 22, END),
}


def codes() -> Iterator[tuple[int, int, int]]:
    """Every symbol with its code and the length of the code."""
    code = before = 0
    for length, symbols in BY_LENGTH.items():
        code <<= length - before
        for symbol in symbols:
            yield symbol, code, length
            code += 1
        before = length


class HuffmanNode:
    """An inner node of the code tree. A child is another node or a symbol."""

    __slots__ = ("children", "ends_well", "steps")

    def __init__(self, *, ends_well: bool) -> None:
        self.children: list[HuffmanNode | int | None] = [None, None]
        self.ends_well = ends_well  # a string may end here: padding is less than a byte of ones (section 5.2)
        self.steps: dict[int, tuple[HuffmanNode, bytes]] = {}


def _code_tree() -> HuffmanNode:
    root = HuffmanNode(ends_well=True)
    for symbol, code, length in codes():
        at = root
        for done in range(1, length):
            bit = code >> (length - done) & 1
            below = at.children[bit]
            if not isinstance(below, HuffmanNode):
                below = at.children[bit] = HuffmanNode(ends_well=at.ends_well and bit == 1 and done < 8)
            at = below
        at.children[code & 1] = symbol
    return root


ROOT = _code_tree()


def huffman_decode(packed: bytes) -> bytes:
    """Decode a Huffman-encoded string."""
    at, parts = ROOT, []
    for byte in packed:
        at, symbols = at.steps.get(byte) or _compute_step(at, byte)
        parts.append(symbols)
    if not at.ends_well:
        raise Malformed(400, "invalid Huffman padding in header")
    return b"".join(parts)


def _compute_step(start: HuffmanNode, byte: int) -> tuple[HuffmanNode, bytes]:
    at, symbols = start, bytearray()
    for shift in range(7, -1, -1):
        below = at.children[byte >> shift & 1]
        if isinstance(below, HuffmanNode):
            at = below
            continue
        if below is None or below == END:
            raise Malformed(400, "invalid Huffman code in header")
        symbols.append(below)
        at = ROOT
    start.steps[byte] = at, bytes(symbols)
    return start.steps[byte]
