"""Names that a reader can rely on: one meaning each, and a sentence for every class."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "gputile"
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path.name != "__init__.py")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def classes(path: Path) -> list[ast.ClassDef]:
    top = [node for node in parsed(path).body if isinstance(node, ast.ClassDef)]
    return [*top, *(node for outer in top for node in outer.body if isinstance(node, ast.ClassDef))]


def test_no_two_public_classes_share_a_name() -> None:
    names = (node.name for path in MODULES for node in classes(path))
    public = Counter(name for name in names if not name.startswith("_"))
    assert [name for name, count in public.items() if count > 1] == []


def test_no_module_has_the_name_of_one_in_a_package_above_it() -> None:
    above = [(path, parent / path.name) for path in MODULES for parent in path.parent.parents]
    assert [path.relative_to(SOURCE) for path, other in above if other in MODULES] == []


@pytest.mark.parametrize("path", MODULES, ids=[str(path.relative_to(SOURCE)) for path in MODULES])
def test_every_module_and_every_class_of_it_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(parsed(path)), "the module has no docstring"
    docstrings = {node.name: ast.get_docstring(node) or "See the module" for node in classes(path)}
    assert [name for name, text in docstrings.items() if text.startswith("See the module")] == []
