"""The table of old and new public words in the CHANGELOG: every new word exists, and no old word is left."""

import re
from functools import cache
from pathlib import Path

import pytest

from gputile.cli.commands import agent, scheduler
from gputile.metrics_api.tables import COLUMNS
from gputile.model.refusals import NodeReason
from tests.telemetry import names

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"\| (?P<what>.+?) \| `(?P<old>[^`]+)` \| `(?P<new>[^`]+)` \|")
ROWS = [row.groups() for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if (row := ROW.fullmatch(line))]
SOURCE = {path: path.read_text() for path in sorted((ROOT / "src").rglob("*.py"))}
DOCTOR = "cli/checks/"  # `gputile doctor` looks for annotations of earlier builds
METRICS = {**names.scheduler(), **names.agent()}
SETTINGS = {"setting": scheduler.SETTINGS.names(), "setting (agent)": agent.SETTINGS.names()}


@cache
def words_of(what: str) -> set[str]:
    """The words of this kind that the code has."""
    if what in SETTINGS:
        return set(SETTINGS[what])
    if what == "metric":
        return set(METRICS)
    if what == "node reason":
        return set(NodeReason)
    if what.startswith("column"):
        return {column.name for columns in COLUMNS.values() for column in columns}
    if what == "log field":
        calls = (line for text in SOURCE.values() for line in text.splitlines() if "fields(" in line)
        return {name for line in calls for name in re.findall(r"(\w+)=", line)}
    label = re.fullmatch(r"label of `(\w+)`", what)
    if label:
        return set(METRICS[label[1]])
    text = "\n".join(text for path, text in SOURCE.items() if DOCTOR not in str(path))
    return {word for literal in re.findall(r'"([^"\n]*)"', text) for word in literal.split()} | set(
        re.findall(r"\b[a-z_]+(?=: )", text)
    )


@pytest.mark.parametrize(("what", "old", "new"), ROWS, ids=[f"{what}-{old}" for what, old, _ in ROWS])
def test_the_new_word_is_there_and_the_old_one_is_gone(what: str, old: str, new: str) -> None:
    words = words_of("values" if what.startswith("values of") else what)
    assert set(new.split(", ")) <= words
    if not what.startswith(("values of", "key of")):  # these are common words
        assert not set(old.split(", ")) & words


def test_the_table_has_every_kind_of_word() -> None:
    kinds = {re.sub(r" of .*| \(.*", "", what) for what, _, _ in ROWS}
    assert kinds == {
        *("setting", "annotation", "event reason", "node reason", "metric", "label", "values", "key", "code"),
        *("column", "log field"),
    }
