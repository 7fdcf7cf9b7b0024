"""Pages that list what the code defines must list all of it."""

import re
from pathlib import Path

import pytest

from gputile.cli.main import COMMANDS
from gputile.dialects.registry import DIALECTS
from gputile.engine.policies.table import POLICIES
from gputile.model.refusals import HAMI_ALIAS, SENTENCE, VGPU_ALIAS, NodeReason, RequestError
from tests.telemetry import names

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("code", list(NodeReason))
def test_every_reason_is_on_its_page_with_its_words_and_aliases(code: NodeReason) -> None:
    (line,) = [
        line for line in (ROOT / "docs/refusals.md").read_text().splitlines() if line.startswith(f"| `{code}` |")
    ]
    for words in (SENTENCE[code], HAMI_ALIAS[code], VGPU_ALIAS[code]):
        assert words in line


@pytest.mark.parametrize("code", list(RequestError))
def test_every_bad_request_is_on_the_page(code: RequestError) -> None:
    assert f"| `{code}` |" in (ROOT / "docs/refusals.md").read_text()


def test_every_dialect_and_policy_is_described_and_has_examples() -> None:
    page, overview = (ROOT / "docs/dialects.md").read_text(), (ROOT / "docs/architecture.md").read_text()
    for dialect in DIALECTS:
        assert f"| {dialect.NAME}" in page
        assert list((ROOT / "examples" / dialect.NAME).glob("*.yaml"))
    for policy in POLICIES:
        assert f"| `{policy}`" in overview


def test_every_metric_is_on_its_page_with_its_labels_and_no_other() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if re.match(r"\| `(gputile|hami)_", line)]
    named = [re.fullmatch(r"(\w+)(?:\{(.*)\})?", name) for row in rows for name in re.findall(r"`([^`]+)`", row)]
    listed = {found[1]: tuple((found[2] or "").split(",")) if found[2] else () for found in named if found}
    assert len(listed) == len(named)
    assert listed == {**names.scheduler(), **names.agent(), **names.hami()}


def test_no_page_has_a_gap_that_was_to_be_filled() -> None:
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        assert not re.search(r"@[A-Z]+@", page.read_text()), page


def test_every_command_is_mentioned_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    for command in COMMANDS:
        assert f"gputile {command}" in readme or f"make {command}" in readme
