"""Corrupts inputs: flips, cuts, doubles and splices bytes; drops, doubles and changes keys.

`Mutator(rng, others)`: `mutate` for JSON, `mutate_bytes` for anything; the same random generator gives the same
result.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

TOKENS = (
    *(b"null", b"true", b"{}", b"[]", b'""', b"NaN", b"-Infinity", b"1e999", b"-0", b"1" + b"0" * 40, b"0x10"),
    *(b"\x00", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\\ud800", b"\\udc00", b"\\u0000", b"\\x"),
    *(b'"', b"{", b"}", b"[", b"]", b",", b":", b"\n", b"//", b"/*", b'{"a":' * 50, b"[" * 50),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**70), 10**300, 0.5, -1e308, float("nan"), float("inf")),
    *("", " ", "0", "-1", "1e9", "1Ki", "9" * 400, "\x00", "é" * 50, "a/b", "../..", "x" * 5000, "n1", "uid-old-0"),
    *([], [None], [[]], {}, {"": None}, {"metadata": None}, {"name": 7}, [1, "a", {}], ["n1"] * 50),
)


class Mutator:
    """Corrupts one input, reproducibly. `others`: inputs of which pieces may be spliced in."""

    def __init__(self, rng: random.Random, others: Sequence[bytes]) -> None:
        self._rng, self._others = rng, others

    def mutate(self, body: bytes) -> bytes:
        if self._rng.random() < 0.6:
            try:
                return self._mutate_tree(json.loads(body))
            except (ValueError, RecursionError):
                pass  # no longer JSON
        return self.mutate_bytes(body)

    def times(self) -> int:
        return self._rng.choice((1, 1, 1, 2, 3, 8))

    # ---- bytes ------------------------------------------------------------------------------------------------------

    def mutate_bytes(self, body: bytes) -> bytes:
        begin = self._rng.randrange(len(body) + 1)
        end = min(len(body), begin + self._rng.choice((0, 1, 1, 2, 8, 64, 1000)))
        other = self._rng.choice(self._others)
        kinds: tuple[Callable[[], bytes], ...] = (
            lambda: body[:begin],
            lambda: body[begin:],
            lambda: body[:begin] + body[end:],
            lambda: body[:end] + body[begin:],
            lambda: body[:begin] + self._rng.choice(TOKENS) + body[end:],
            lambda: body[:begin] + self._rng.randbytes(end - begin) + body[end:],
            lambda: body[:begin] + bytes(byte ^ 1 << self._rng.randrange(8) for byte in body[begin:end]) + body[end:],
            lambda: body[:begin] + other[self._rng.randrange(len(other) + 1) :],
            lambda: body[begin:end] * self._rng.choice((2, 100)),
        )
        return self._rng.choice(kinds)()

    # ---- trees ------------------------------------------------------------------------------------------------------

    def _mutate_tree(self, tree: Any) -> bytes:
        parent, key = self._rng.choice(list(_places(tree)) or [(None, None)])
        if parent is None:
            return self._written(self._value())
        match self._rng.randrange(6 if isinstance(parent, dict) else 5):
            case 0:
                del parent[key]
            case 1 | 2:
                parent[key] = self._value()
            case 3:
                parent[key] = [parent[key]]
            case 4:
                theirs, other = self._rng.choice(list(_places(tree)))
                parent[key], theirs[other] = theirs[other], parent[key]
            case 5:
                parent[self._rng.choice((str(key).upper(), str(key).lower(), f"{key}x"))] = parent[key]
        return self._written(tree)

    def _value(self) -> Any:
        chance = self._rng.random()
        if chance < 0.005:
            return _deep(self._rng.choice((100, 900, 5000)))
        if chance < 0.007:
            return "x" * 2**20
        return self._rng.choice(VALUES)

    def _written(self, tree: Any) -> bytes:
        """Encode as JSON; NaN and lone surrogates are written too."""
        try:
            return json.dumps(tree, ensure_ascii=self._rng.random() < 0.5).encode("utf-8", "surrogatepass")
        except (ValueError, RecursionError):  # contains itself, or too deep to be encoded
            return b'{"a":' * 100_000


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of the tree."""
    todo = [tree]
    while todo:
        container = todo.pop()
        keys: Any = (
            list(container)
            if isinstance(container, dict)
            else range(len(container))
            if isinstance(container, list)
            else ()
        )
        for key in keys:
            yield container, key
            todo.append(container[key])


def _deep(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value
