"""Words that we no longer use stay out of what people read: pages, and strings, docstrings and comments of the code and
of the end-to-end tests, and names in these tests.

The left column is what to write instead. CONTRIBUTING.md has the rules; docs/glossary.md the words that are ours.
"""

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

INSTEAD = {
    "reserve": r"pencil\w*",
    "unreserve": r"rub(s|bed|bing)? out|rubbed",
    "nomination, guarantee": r"promis(e|es|ed|ing)",
    "allocated": r"sold|sells?|selling",
    "double-allocated": r"sold twice|sells? .{0,20}twice",
    "overcommitted": r"oversold|oversells?|overselling",
    "orphaned": r"linger(s|ed|ing)?",
    "bound by another scheduler": r"c[ao]me(s)? around (us|gputile|the scheduler)|coming around us",
    "lost leadership": r"leads? no more",
    "rejection, reject": r"an? no|definite no|no's|sa(y|ys|id|ying) no|answers? no|told no",
    "ledger": r"(the|a|its|our) books?(?! of)|booked|booking",
    "free capacity": r"room",
    "API, interface": r"doors?",
    "layer, package": r"storeys?",
    "undecodable": r"spoilt",
    "updated": r"mend(s|ed|ing)?",
    "metrics, numbers, amounts": r"figures",
    "hit by an XID": r"struck",
    "a thing with a name": r"whoever|somebody",
    "ignored": r"none of our business",
}
"""What to write instead, and what must not be written: case-insensitive, whole words."""

ANY = re.compile(rf"\b({'|'.join(INSTEAD.values())})\b")
"""For text in lower case, which is three times as fast as to ignore the case."""

BETWEEN_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z])|_")

FORM = re.compile(r"^\s*(\"\"\")?(Room|Door): ", re.MULTILINE)
"""The old form of a module's docstring."""

ALLOWED = {
    "docs/cli.md": ("`gputile.io/promise`", "`gputile.io/lingering`"),  # the check `leftovers` of doctor
    "docs/install.md": ("`gputile.io/promise`", "`gputile.io/lingering`"),  # keys of builds before 0.1.0
    "src/gputile/cli/checks": ("gputile.io/promise", "gputile.io/lingering"),  # doctor names left-over keys
    "tests/e2e/service.py": ("SO_LINGER", "SO LINGER"),  # an option of sockets
    "tests/cli/test_doctor.py": ("gputile.io/promise", "gputile.io/lingering"),  # left-over keys that doctor names
}
"""By file or folder: the exact texts that may stand there."""

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")])
PAGES = [page for page in PAGES if page.name != "CHANGELOG.md"]  # it lists old names beside new ones
MANIFESTS = sorted([*(ROOT / "deploy").rglob("*.yaml"), *(ROOT / "examples").rglob("*.yaml")])
FOLDERS = ("src", "bench", "tests/e2e", "tests")  # of Python modules


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def modules(folder: str) -> list[Path]:
    """Each module belongs to the first of the folders that it is in. This one lists the old words."""
    found = [path for path in sorted((ROOT / folder).rglob("*.py")) if path != Path(__file__)]
    return [path for path in found if folder == next(name for name in FOLDERS if path.is_relative_to(ROOT / name))]


def complaints(path: Path, texts: list[tuple[int, str]]) -> list[str]:
    """`file:line: word; write instead`, for each forbidden word in the texts."""
    name = relative(path)
    allowed = [text for place, texts_ in ALLOWED.items() if name.startswith(place) for text in texts_]
    found = []
    for line, text in texts:
        if not ANY.search(text.lower()):
            continue
        for exact in allowed:
            text = text.replace(exact, "")
        for instead, pattern in INSTEAD.items():
            for match in re.finditer(rf"\b({pattern})\b", text, re.IGNORECASE):
                number = line + text.count("\n", 0, match.start())
                found.append(f"{name}:{number}: {match[0]!r}; write: {instead}")
    return found


def may_have_old_words(text: str) -> bool:
    """Whether any token of a module could be complained about. Splitting all modules into tokens takes seconds."""
    return bool(ANY.search(text.lower()) or ANY.search(BETWEEN_WORDS.sub(" ", text).lower()))


def words_of(path: Path) -> list[tuple[int, str]]:
    """Strings, docstrings, comments and names (as words) of a module, each with its line."""
    prose = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    tokens = list(tokenize.generate_tokens(io.StringIO(path.read_text()).readline))
    names = {token.string: token.start[0] for token in reversed(tokens) if token.type == tokenize.NAME}
    return [
        *((token.start[0], token.string) for token in tokens if token.type in prose),
        *((line, BETWEEN_WORDS.sub(" ", name)) for name, line in names.items()),
    ]


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_a_page_uses_the_words_of_the_field(page: Path) -> None:
    assert complaints(page, [(1, page.read_text())]) == []


@pytest.mark.parametrize("manifest", MANIFESTS, ids=relative)
def test_a_manifest_uses_the_words_of_the_field(manifest: Path) -> None:
    assert complaints(manifest, [(1, manifest.read_text())]) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_code_uses_the_words_of_the_field(folder: str) -> None:
    suspects = [module for module in modules(folder) if may_have_old_words(module.read_text())]
    found = [complaints(module, words_of(module)) for module in suspects]
    assert [complaint for each in found for complaint in each] == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_docstring_has_the_form_of_rooms_and_doors(folder: str) -> None:
    assert [relative(module) for module in modules(folder) if FORM.search(module.read_text())] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("A pencil lasts two seconds.", ["pencil"], id="a-word-is-found"),
        pytest.param("the tile was\nsold twice", ["sold", "sold twice"], id="two-rules-may-apply-to-one-text"),
        pytest.param("a bookmark; soldier; another node; no node", [], id="parts-of-other-words-are-not"),
        pytest.param("Leads no more", ["Leads no more"], id="case-does-not-matter"),
    ],
)
def test_the_rules_find_what_they_should(text: str, words: list[str]) -> None:
    found = complaints(ROOT / "docs" / "none.md", [(1, text)])
    assert [re.findall(r"'([^']*)'", complaint)[0] for complaint in found] == words
