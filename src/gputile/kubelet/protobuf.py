"""Encodes and decodes protocol buffers, as far as the messages of the kubelet and the container runtime need it.

A `Message` is a Struct whose fields are declared in the order of their field numbers, from 1. Supported are strings,
bools, ints, messages, lists of strings or messages, and maps of strings; these APIs use nothing else. Unknown field
numbers are skipped.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from gputile.model.errors import GputileError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
FIXED = {FIXED64: 8, FIXED32: 4}
MOST_FIELDS = 300_000
"""Fields of one message, nested messages included. The largest real message has some 100,000 devices."""


class InvalidMessage(GputileError):
    """The bytes do not decode as the expected message."""


class Message(msgspec.Struct, kw_only=True):
    """Base of all messages; every field has a default, because empty values are not sent."""


M = TypeVar("M", bound=Message)


class Field(NamedTuple):
    """One field of a message: its name, its type (for a list or map: of the items), and its shape."""

    name: str
    kind: Any
    shape: type | None  # list, dict, or None for a single value
    empty: Any  # the default value, which is not sent


@cache
def fields(message_type: type[Message]) -> tuple[Field, ...]:
    """The fields of a message type, in the order of their numbers."""
    hints = get_type_hints(message_type)
    return tuple(_field(name, hints[name]) for name in message_type.__struct_fields__)


def _field(name: str, hint: Any) -> Field:
    origin = get_origin(hint)
    return Field(name, get_args(hint)[0], origin, None) if origin in (list, dict) else Field(name, hint, None, hint())


# ---- encode ---------------------------------------------------------------------------------------------------------


def encode(message: Message) -> bytes:
    out = bytearray()
    for number, field in enumerate(fields(type(message)), 1):
        value = getattr(message, field.name)
        if field.shape is list:
            for item in value:
                _put(out, number, item)
        elif field.shape is dict:
            for key, item in value.items():
                _put_bytes(out, number, _map_entry(key, item))
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


def _map_entry(key: str, value: str) -> bytes:
    out = bytearray()
    _put(out, 1, key)
    _put(out, 2, value)
    return bytes(out)


def _varint(value: int) -> bytes:
    value &= 2**64 - 1  # two's complement: negative numbers take ten bytes
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


# ---- decode ---------------------------------------------------------------------------------------------------------


class FieldBudget:
    """The number of fields that may still be decoded of one message; it bounds the time that a message takes."""

    def __init__(self) -> None:
        self._remaining = MOST_FIELDS

    def spend(self) -> None:
        self._remaining -= 1
        if self._remaining < 0:
            raise InvalidMessage(f"message has more than {MOST_FIELDS} fields")


def decode(kind: type[M], data: bytes) -> M:
    return _decode(kind, data, FieldBudget())


def _decode(kind: type[M], data: bytes, budget: FieldBudget) -> M:
    values: dict[str, Any] = {}
    known = fields(kind)
    for number, wire, value in _fields_in(data, budget):
        if number > len(known):
            continue
        field = known[number - 1]
        decoded = _decode_value(field, wire, value, kind, budget)
        if field.shape is list:
            values.setdefault(field.name, []).append(decoded)
        elif field.shape is dict:
            values.setdefault(field.name, {}).update(decoded)
        else:
            values[field.name] = decoded
    return kind(**values)


def _decode_value(field: Field, wire: int, value: int | bytes, kind: type[Message], budget: FieldBudget) -> Any:
    if field.kind in (int, bool) and wire == VARINT and isinstance(value, int):
        return bool(value) if field.kind is bool else _signed(value)
    if field.kind in (int, bool) or not isinstance(value, bytes):
        raise InvalidMessage(f"`{field.name}` of {kind.__name__} has wrong wire type {wire}")
    if field.shape is dict:
        entry = {number: _text(item) for number, _, item in _fields_in(value, budget) if isinstance(item, bytes)}
        return {entry.get(1, ""): entry.get(2, "")}
    return _text(value) if field.kind is str else _decode(field.kind, value, budget)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidMessage(f"invalid UTF-8 in a string, at byte {error.start}") from error


def _fields_in(data: bytes, budget: FieldBudget) -> Iterator[tuple[int, int, int | bytes]]:
    """Number, wire type and value of each field, in the order of the data."""
    at = 0
    while at < len(data):
        budget.spend()
        tag, at = _read_varint(data, at)
        number, wire = tag >> 3, tag & 7
        if not number:
            raise InvalidMessage("invalid field number 0")
        value: int | bytes
        if wire == VARINT:
            value, at = _read_varint(data, at)
        elif wire == BYTES:
            size, at = _read_varint(data, at)
            value, at = _slice(data, at, size)
        elif wire in FIXED:
            value, at = _slice(data, at, FIXED[wire])
        else:
            raise InvalidMessage(f"unsupported wire type {wire}")
        yield number, wire, value


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value & (2**64 - 1), at
        shift += 7
        if shift > 63:
            raise InvalidMessage("varint has more than ten bytes")
    raise InvalidMessage("message ends inside a varint")


def _slice(data: bytes, at: int, size: int) -> tuple[bytes, int]:
    if at + size > len(data):
        raise InvalidMessage(f"message is truncated by {at + size - len(data)} bytes")
    return data[at : at + size], at + size


def decoder(kind: type[M]) -> Callable[[bytes], M]:
    """The deserializer of a message type, as gRPC takes it."""
    return lambda data: decode(kind, data)
