"""Surprises, as one tree. An expected "no" is a value (`refusals.py`) and not in here.

GputileError          anything a person should read instead of a traceback
├── InputError        a file, flag or manifest that cannot be used; says where, and what to do
└── DoubleBooked      the book holds more of a card than it has; carries the story
"""


class GputileError(Exception):
    """A sentence with what, where and what to do next."""


class InputError(GputileError):
    """A file, flag or manifest that cannot be used."""


class Overcommitted(GputileError):
    """The book holds more of a card than it has, or lost count."""
