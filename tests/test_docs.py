"""Pages that list what the code defines must list all of it."""

import re
import sys
from pathlib import Path
from types import FrameType

import pytest

from gputile.cli.main import COMMANDS
from gputile.dialects.registry import DIALECTS
from gputile.engine.policies.table import POLICIES
from gputile.ledger.events import QuotasSet
from gputile.model.refusals import SENTENCE, NodeReason, RequestError
from gputile.quota.limits import Limit, Quota
from gputile.testing.builders import node
from tests.refusal_aliases import HAMI_ALIAS, VGPU_ALIAS
from tests.scheduler.rig import Rig, tile
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


# ---- one filter call, on one page ------------------------------------------------------------------------------------

CALL = (ROOT / "docs/architecture.md").read_text().partition("## One filter call\n")[2].partition("\n## ")[0]
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in CALL.splitlines() if re.match(r"\| \d", line)]
SOURCE = ROOT / "src/gputile"


@pytest.mark.parametrize("row", ROWS, ids=[f"{row[0]}-{row[1]}" for row in ROWS])
def test_the_page_of_a_filter_call_names_functions_that_exist(row: list[str]) -> None:
    code = (SOURCE / row[1].strip("`")).read_text()
    named = re.findall(r"`(\w+)`", row[2])
    assert named
    assert [name for name in named if not re.search(rf"(def {name}\(|^{name}\b)", code, re.MULTILINE)] == []


@pytest.mark.parametrize(
    ("policy", "memory", "cards"),
    [
        pytest.param("tiling", 8, 8, id="a-pod-within-quota"),
        pytest.param("binpack", 8, 8, id="under-a-simple-policy"),
        pytest.param("tiling", 99, 8, id="a-pod-that-fits-nowhere"),
        pytest.param("tiling", 8, 0, id="a-pod-beyond-quota"),
    ],
)
def test_a_filter_call_enters_only_modules_of_its_page(policy: str, memory: int, cards: int) -> None:
    """Values (`model/`, `dialects/kube_objects.py`) and counters of metrics need no line."""
    rig = Rig(*(node(f"n{number}").cards(4, size=16) for number in range(5)), policy=policy)
    rig.apply(rig.ledger.handle(QuotasSet({"default": Quota((Limit(model="*", cards=100 * cards),))})))
    rig.arrive(tile(memory))
    entered: set[str] = set()

    def record(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            entered.add(frame.f_code.co_filename.removeprefix(f"{SOURCE}/"))

    sys.setprofile(record)
    try:
        for _ in range(2):  # the second call replaces a reservation, or repeats a rejection
            rig.filter()
    finally:
        sys.setprofile(None)
    values = {name for name in entered if name.startswith(("model/", "dialects/kube_objects", "telemetry/"))}
    unnamed = entered - values - {"dialects/parsing.py"}
    assert "engine/fleet/fleet.py" in entered
    assert sorted(name for name in unnamed if f"`{name}`" not in CALL) == []
