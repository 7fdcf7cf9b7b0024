"""Pages that list what the code defines must list all of it."""

import re
from pathlib import Path

import pytest

from gputile.cli.main import COMMANDS
from gputile.dialects.registry import DIALECTS
from gputile.engine.policies.table import POLICIES
from gputile.model.refusals import SENTENCE, NodeReason, RequestError
from tests.refusal_aliases import HAMI_ALIAS, VGPU_ALIAS
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
    listed = {match[1]: tuple((match[2] or "").split(",")) if match[2] else () for match in named if match}
    assert len(listed) == len(named)
    assert listed == {**names.scheduler(), **names.agent(), **names.hami()}


def test_no_page_has_a_gap_that_was_to_be_filled() -> None:
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        assert not re.search(r"@[A-Z]+@", page.read_text()), page


def test_every_command_is_mentioned_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    for command in COMMANDS:
        assert f"gputile {command}" in readme or f"make {command}" in readme


def shape(page: str) -> list[tuple[str, str]]:
    """What both READMEs must have in common, in order: heading levels, code without its comments, numbers, links."""
    shape, in_code = [], False
    for line in (ROOT / page).read_text().splitlines():
        if line.startswith("```"):
            in_code = not in_code
        elif in_code:
            shape.append(("code", re.sub(r"\s+# .*", "", line)))
        else:
            shape += [("heading", match) for match in re.findall(r"^#+(?= )", line)]
            shape += [("link", match) for match in re.findall(r"\]\(([^)]+)\)", line) if not match.startswith("README")]
            shape += [("inline", match) for match in re.findall(r"`([^`]+)`", line)]
            shape += [("number", match) for match in re.findall(r"\d+(?:[.,]\d+)*", re.sub(r"`[^`]*`", "", line))]
    return shape


@pytest.mark.parametrize("kind", ["heading", "code", "number", "link", "inline"])
def test_the_chinese_readme_has_the_same_headings_commands_numbers_and_links(kind: str) -> None:
    english, chinese = (
        [value for name, value in shape(page) if name == kind] for page in ("README.md", "README.zh-CN.md")
    )
    assert chinese == english


def test_every_readme_links_to_the_other_at_the_top() -> None:
    for page, other in (("README.md", "README.zh-CN.md"), ("README.zh-CN.md", "README.md")):
        assert f"]({other})" in (ROOT / page).read_text().split("\n\n")[1]


def test_every_link_between_pages_leads_to_a_file_and_heading() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            if path.startswith(("http:", "https:", "mailto:")):
                continue
            linked = (page.parent / path).resolve() if path else page
            assert linked.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(linked), f"{page.name}: {target}"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
