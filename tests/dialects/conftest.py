"""The eighth dialect, registered: one line for the dialect and one for the audit's reader of its record."""

import pytest

from gputile.audit.records import readers
from gputile.dialects import registry
from tests.dialects import eighth, eighth_record


@pytest.fixture
def registered_eighth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "DIALECTS", (*registry.DIALECTS, eighth))
    monkeypatch.setattr(readers, "READERS", (*readers.READERS, eighth_record))
