"""Settings of a process put together: one YAML file, then the environment, then flags; the later wins.

Room:  works on any tree of settings Structs whose fields carry their meaning as text below them. Unknown keys are
       refused with the nearest right name, because a setting that is silently ignored is found out in production.
Door:  `SettingsLoader`, one per process; `document` reads the file.
"""

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, TypeVar, get_origin, get_type_hints

import msgspec

from gputile.model.errors import InputError
from gputile.text.documents import SETTINGS, NotYaml, content, read_one

S = TypeVar("S", bound=msgspec.Struct)

PREFIX = "GPUTILE_"
SERVICE_LINKS = ("_SERVICE_HOST", "_SERVICE_PORT", "_PORT")
"""Kubernetes puts `<SERVICE>_PORT...` into every pod; a Service named gputile-... must not look like a setting."""


def document(config: Path | None) -> Any:
    """What the file says; None without a file."""
    if config is None:
        return None
    try:
        with config.open("rb") as file:
            return read_one(content(file, SETTINGS).decode())
    except (OSError, UnicodeDecodeError) as wrong:
        raise InputError(f"{config}: cannot be read: {wrong}; name a YAML file with --config") from wrong
    except NotYaml as wrong:
        where = f"{config}, line {wrong.line}" if wrong.line else str(config)
        raise InputError(f"{where}: this is no YAML: {wrong.problem}; mend the file and try again") from wrong


class SettingsLoader(Generic[S]):
    """The settings of one process: their tree, their rules beyond types, and the command that shows them."""

    def __init__(
        self, tree: type[S], checked: Callable[[S], S], above_zero: tuple[str, ...], command: str, example: str
    ) -> None:
        """`above_zero` are numbers that must be; `example` is a flag as one might write it."""
        self._tree, self._checked, self._above_zero = tree, checked, above_zero
        self._command, self._example = command, example

    def compose(self, document: Any, environment: Mapping[str, str], flags: Mapping[str, str], source: str) -> S:
        """Defaults, the file, GPUTILE_..., then flags by dotted name. `source` is how errors name the file."""
        tree = document if document is not None else {}
        if not isinstance(tree, dict):
            kind = type(tree).__name__
            raise InputError(f"{source}: settings are a YAML mapping such as `log_level: debug`, not {kind}")
        self._refuse_unknown(tree, self._tree, source, "")
        for name, value in {**self._from_environment(environment), **self._from_flags(flags)}.items():
            tree = _set(tree, name, self._words(name, value))
        try:
            return self.checked(msgspec.convert(tree, self._tree, strict=False))
        except msgspec.ValidationError as wrong:
            raise InputError(f"{source}: {wrong}; see `{self._command} --show-settings`") from wrong

    def checked(self, settings: S) -> S:
        """What types cannot say."""
        for name in self._above_zero:
            if not 0 < _get(settings, name) < float("inf"):
                raise InputError(f"setting `{name}` is {_get(settings, name)}; write a number above 0")
        return self._checked(settings)

    def names(self) -> dict[str, Any]:
        """Every setting by its dotted name, with its default."""
        return {name: default for name, default, _ in _fields(self._tree, "")}

    def changed(self, settings: S) -> dict[str, Any]:
        """The settings that are not at their defaults, by their dotted names."""
        usual = self._tree()
        return {name: _get(settings, name) for name in self.names() if _get(settings, name) != _get(usual, name)}

    def flags(self, sets: tuple[str, ...], **named: str | None) -> dict[str, str]:
        """From `--set NAME=VALUE`, and from flags that are a setting by themselves."""
        found = {}
        for one in sets:
            name, equals, value = one.partition("=")
            if not equals:
                some = ", ".join(list(self.names())[:3])
                raise InputError(f"--set {one}: write NAME=VALUE, for example {self._example}; names are {some}, ...")
            found[name.strip()] = value
        return found | {name: value for name, value in named.items() if value}

    # ---- how --------------------------------------------------------------------------------------------------------

    def _words(self, name: str, value: str) -> str | list[str]:
        """A list is written with commas."""
        if any(known == name and is_list for known, _, is_list in _fields(self._tree, "")):
            return [part.strip() for part in value.split(",") if part.strip()]
        return value

    def _refuse_unknown(self, tree: dict[Any, Any], of: type[msgspec.Struct], source: str, before: str) -> None:
        known = [field.name for field in msgspec.structs.fields(of)]
        for key, value in tree.items():
            if key not in known:
                hint = self._hint(f"{before}{key}", [*self.names(), *(f"{before}{name}" for name in known)])
                raise InputError(f"{source}: there is no setting `{before}{key}`; {hint}")
            inner = _inner(of, key)
            if inner is not None and isinstance(value, dict):
                self._refuse_unknown(value, inner, source, f"{before}{key}.")

    def _from_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """`GPUTILE_FILTER_KEEP` is `filter.keep`."""
        by_variable = {PREFIX + name.upper().replace(".", "_"): name for name in self.names()}
        found = {}
        for variable, value in environment.items():
            if variable in by_variable:
                found[by_variable[variable]] = value
            elif variable.startswith(PREFIX) and not any(part in variable for part in SERVICE_LINKS):
                hint = self._hint(variable, list(by_variable))
                raise InputError(f"there is no setting for the variable {variable}; {hint}")
        return found

    def _from_flags(self, flags: Mapping[str, str]) -> dict[str, str]:
        every = list(self.names())
        for name in flags:
            if name not in every:
                raise InputError(f"--set: there is no setting `{name}`; {self._hint(name, every)}")
        return dict(flags)

    def _hint(self, word: str, known: list[str]) -> str:
        near = _nearest(word, known)
        return f"{f'did you mean `{near}`? ' if near else ''}`{self._command} --show-settings` has them all"


def explained(settings: msgspec.Struct) -> str:
    """The settings in force as YAML, each under its meaning."""
    return "\n".join(_explained(settings, "")) + "\n"


def _explained(settings: msgspec.Struct, indent: str) -> Iterator[str]:
    meanings = _meanings(type(settings))
    for field in msgspec.structs.fields(settings):
        value = getattr(settings, field.name)
        yield from (f"{indent}# {line.strip()}" for line in meanings.get(field.name, "").splitlines())
        if isinstance(value, msgspec.Struct):
            yield f"{indent}{field.name}:"
            yield from _explained(value, indent + "  ")
        else:
            yield f"{indent}{field.name}: {msgspec.json.encode(value).decode()}"


def _meanings(of: type[msgspec.Struct]) -> dict[str, str]:
    """The text under each field, which the classes carry for readers; here it is for users."""
    body = ast.parse(inspect.getsource(of)).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = str(ast.literal_eval(text.value))
    return found


def _fields(of: type[msgspec.Struct], before: str) -> Iterator[tuple[str, Any, bool]]:
    """Dotted name, default, and whether it is a list."""
    hints = get_type_hints(of)
    for field in msgspec.structs.fields(of):
        inner = _inner(of, field.name)
        if inner is not None:
            yield from _fields(inner, f"{before}{field.name}.")
        else:
            yield f"{before}{field.name}", field.default, get_origin(hints[field.name]) is tuple


def _inner(of: type[msgspec.Struct], name: str) -> type[msgspec.Struct] | None:
    hint = get_type_hints(of)[name]
    return hint if isinstance(hint, type) and issubclass(hint, msgspec.Struct) else None


def _nearest(word: str, known: list[str]) -> str:
    """The right name for a wrong one, or "" when none is near; a forgotten section (`keep` for `filter.keep`) is the
    likeliest slip."""
    same_end = [name for name in known if name.rpartition(".")[2] == word.rpartition(".")[2]]
    return next(iter(same_end or get_close_matches(word, known, n=1)), "")


def _set(tree: dict[Any, Any], name: str, value: str | list[str]) -> dict[Any, Any]:
    head, _, rest = name.partition(".")
    if not rest:
        return {**tree, head: value}
    inner = tree.get(head)
    return {**tree, head: _set(inner if isinstance(inner, dict) else {}, rest, value)}


def _get(settings: msgspec.Struct, name: str) -> Any:
    found: Any = settings
    for part in name.split("."):
        found = getattr(found, part)
    return found
