"""The exceptions of gputile, as one tree. An expected rejection is a value (`refusals.py`), not an exception.

GputileError          an error with a message for the user, shown instead of a traceback
├── InputError        an unusable file, flag or manifest; the message says where and what to do
└── Overcommitted     the ledger allocates more of a card than it has; the message has the history
"""


class GputileError(Exception):
    """An error whose message says what is wrong, where, and what to do next."""


class InputError(GputileError):
    """An unusable file, flag or manifest."""


class Overcommitted(GputileError):
    """The ledger allocates more of a card than it has, or its sums are inconsistent."""
