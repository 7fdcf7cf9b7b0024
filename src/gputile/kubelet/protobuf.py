"""Protocol buffers for the few small messages that we exchange with the kubelet and the runtime.

Room:  a `Message` is a Struct whose fields are in the order of their numbers, from 1. Text, bool, int, messages, lists
       of text or messages, and maps of text are all that these APIs use. Unknown numbers are skipped.
Door:  `encode(message)`, `decode(kind, data)`.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from gputile.model.errors import GputileError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
FIXED = {FIXED64: 8, FIXED32: 4}
MOST_FIELDS = 300_000
"""Fields of one message with all that it holds. The largest that is real names some 100,000 devices."""


class InvalidMessage(GputileError):
    """Bytes that are no message of the kind that was expected."""


class Message(msgspec.Struct, kw_only=True):
    """Base of all messages; every field has a default, for what is empty is not sent."""


M = TypeVar("M", bound=Message)


class Field(NamedTuple):
    """One field of a message: its name, its type (of the items, if it has many), and whether it is a list or a map."""

    name: str
    kind: Any
    shape: type | None  # list, dict, or None for a single value
    empty: Any  # what is not sent


@cache
def fields(of: type[Message]) -> tuple[Field, ...]:
    hints = get_type_hints(of)
    return tuple(_field(name, hints[name]) for name in of.__struct_fields__)


def _field(name: str, hint: Any) -> Field:
    origin = get_origin(hint)
    return Field(name, get_args(hint)[0], origin, None) if origin in (list, dict) else Field(name, hint, None, hint())


# ---- out ------------------------------------------------------------------------------------------------------------


def encode(message: Message) -> bytes:
    out = bytearray()
    for number, field in enumerate(fields(type(message)), 1):
        value = getattr(message, field.name)
        if field.shape is list:
            for item in value:
                _put(out, number, item)
        elif field.shape is dict:
            for key, item in value.items():
                _put_bytes(out, number, _pair(key, item))
        elif value and value != field.empty:
            _put(out, number, value)
    return bytes(out)


def _put(out: bytearray, number: int, value: Any) -> None:
    if isinstance(value, int):  # bool too
        out += _varint(number << 3 | VARINT) + _varint(int(value))
    elif isinstance(value, str):
        _put_bytes(out, number, value.encode())
    else:
        _put_bytes(out, number, encode(value))


def _put_bytes(out: bytearray, number: int, data: bytes) -> None:
    out += _varint(number << 3 | BYTES) + _varint(len(data)) + data


def _pair(key: str, value: str) -> bytes:
    out = bytearray()
    _put(out, 1, key)
    _put(out, 2, value)
    return bytes(out)


def _varint(value: int) -> bytes:
    value &= 2**64 - 1  # as the format has it, negative numbers take ten bytes
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


# ---- in -------------------------------------------------------------------------------------------------------------


class FieldBudget:
    """How many fields may still be read."""

    def __init__(self) -> None:
        self._left = MOST_FIELDS

    def spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise InvalidMessage(f"the message has more than {MOST_FIELDS} fields")


def decode(kind: type[M], data: bytes) -> M:
    return _decode(kind, data, FieldBudget())


def _decode(kind: type[M], data: bytes, budget: FieldBudget) -> M:
    found: dict[str, Any] = {}
    known = fields(kind)
    for number, wire, value in _parts(data, budget):
        if number > len(known):
            continue
        field = known[number - 1]
        read = _read(field, wire, value, kind, budget)
        if field.shape is list:
            found.setdefault(field.name, []).append(read)
        elif field.shape is dict:
            found.setdefault(field.name, {}).update(read)
        else:
            found[field.name] = read
    return kind(**found)


def _read(field: Field, wire: int, value: int | bytes, kind: type[Message], budget: FieldBudget) -> Any:
    if field.kind in (int, bool) and wire == VARINT and isinstance(value, int):
        return bool(value) if field.kind is bool else _signed(value)
    if field.kind in (int, bool) or not isinstance(value, bytes):
        raise InvalidMessage(f"`{field.name}` of {kind.__name__} has the wrong wire type {wire}")
    if field.shape is dict:
        pair = {number: _text(item) for number, _, item in _parts(value, budget) if isinstance(item, bytes)}
        return {pair.get(1, ""): pair.get(2, "")}
    return _text(value) if field.kind is str else _decode(field.kind, value, budget)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as wrong:
        raise InvalidMessage(f"text that is no UTF-8: {wrong}") from wrong


def _parts(data: bytes, budget: FieldBudget) -> Iterator[tuple[int, int, int | bytes]]:
    """Number, wire type and value of each field, as they come."""
    at = 0
    while at < len(data):
        budget.spend()
        tag, at = _number(data, at)
        number, wire = tag >> 3, tag & 7
        if not number:
            raise InvalidMessage("a field has the number 0")
        value: int | bytes
        if wire == VARINT:
            value, at = _number(data, at)
        elif wire == BYTES:
            size, at = _number(data, at)
            value, at = _slice(data, at, size)
        elif wire in FIXED:
            value, at = _slice(data, at, FIXED[wire])
        else:
            raise InvalidMessage(f"wire type {wire} is not used any more")
        yield number, wire, value


def _number(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value & (2**64 - 1), at
        shift += 7
        if shift > 63:
            raise InvalidMessage("a number has more than ten bytes")
    raise InvalidMessage("the message ends in the middle of a number")


def _slice(data: bytes, at: int, size: int) -> tuple[bytes, int]:
    if at + size > len(data):
        raise InvalidMessage(f"the message ends {at + size - len(data)} bytes early")
    return data[at : at + size], at + size


def decoder(kind: type[M]) -> Callable[[bytes], M]:
    """For gRPC, which wants a function of bytes."""
    return lambda data: decode(kind, data)
