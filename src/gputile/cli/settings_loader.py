"""Settings of a process: one YAML file, then the environment, then flags; the later wins.

Works on any tree of settings Structs whose fields carry their meaning as text below them. An unknown key is rejected
with the nearest known name, because a setting that is silently ignored is only noticed in production.
"""

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from gputile.model.decode_errors import decode_problem, file_problem, shortened
from gputile.model.errors import InputError
from gputile.text.documents import SETTINGS, NotYaml, content, read_one

S = TypeVar("S", bound=msgspec.Struct)

PREFIX = "GPUTILE_"
SERVICE_LINKS = ("_SERVICE_HOST", "_SERVICE_PORT", "_PORT")
"""Kubernetes puts `<SERVICE>_PORT...` into every pod; a Service named gputile-... must not look like a setting."""


def document(config: Path | None) -> Any:
    """The content of the settings file; None without a file."""
    if config is None:
        return None
    try:
        with config.open("rb") as file:
            return read_one(content(file, SETTINGS).decode())
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{config}: cannot be read: {file_problem(error)}; name a YAML file with --config") from error
    except NotYaml as error:
        where = f"{config}, line {error.line}" if error.line else str(config)
        raise InputError(f"{where}: invalid YAML: {error.problem}; correct the file and try again") from error


class SettingsLoader(Generic[S]):
    """The settings of one process: their tree, their rules beyond types, and the command that shows them."""

    def __init__(
        self, tree: type[S], checked: Callable[[S], S], above_zero: tuple[str, ...], command: str, example: str
    ) -> None:
        """`above_zero` names the numbers that must be positive; `example` is a flag as a user might write it."""
        self._tree, self._checked, self._above_zero = tree, checked, above_zero
        self._command, self._example = command, example

    def compose(self, document: Any, environment: Mapping[str, str], flags: Mapping[str, str], source: str) -> S:
        """Defaults, the file, GPUTILE_..., then flags by dotted name. `source` is how errors name the file."""
        tree = document if document is not None else {}
        if not isinstance(tree, dict):
            kind = "a list" if isinstance(tree, list) else f"the value {_shown(tree)}"
            raise InputError(f"{source}: settings are a YAML mapping such as `log_level: debug`, not {kind}")
        self._reject_unknown(tree, self._tree, source, "")
        overrides = {**self._from_environment(environment), **self._from_flags(flags)}
        for name, value in overrides.items():
            tree = _set(tree, name, self._split_list(name, value))
        try:
            settings = msgspec.convert(tree, self._tree, strict=False)
        except msgspec.ValidationError as error:
            raise InputError(self._explain_invalid(error, tree, source, overrides)) from error
        return self.checked(settings)

    def checked(self, settings: S) -> S:
        """Check what types cannot express."""
        for name in self._above_zero:
            if not 0 < _get(settings, name) < float("inf"):
                raise InputError(f"setting `{name}` is {_get(settings, name)}; write a number above 0")
        return self._checked(settings)

    def names(self) -> dict[str, Any]:
        """Every setting by its dotted name, with its default."""
        return {name: default for name, default, _ in _fields(self._tree, "")}

    def changed(self, settings: S) -> dict[str, Any]:
        """The settings that differ from their defaults, by their dotted names."""
        defaults = self._tree()
        return {name: _get(settings, name) for name in self.names() if _get(settings, name) != _get(defaults, name)}

    def flags(self, sets: tuple[str, ...], **named: str | None) -> dict[str, str]:
        """From `--set NAME=VALUE`, and from flags that are a setting by themselves."""
        values = {}
        for assignment in sets:
            name, equals, value = assignment.partition("=")
            if not equals:
                some = ", ".join(list(self.names())[:3])
                example = f"write NAME=VALUE, for example {self._example}; names are {some}, ..."
                raise InputError(f"--set {assignment}: the value is missing; {example}")
            values[name.strip()] = value
        return values | {name: value for name, value in named.items() if value}

    # ---- reading ----------------------------------------------------------------------------------------------------

    def _split_list(self, name: str, value: str) -> str | list[str]:
        """A list is written with commas."""
        if any(known == name and is_list for known, _, is_list in _fields(self._tree, "")):
            return [part.strip() for part in value.split(",") if part.strip()]
        return value

    def _from_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """`GPUTILE_FILTER_KEEP` is `filter.keep`."""
        by_variable = {PREFIX + name.upper().replace(".", "_"): name for name in self.names()}
        values = {}
        for variable, value in environment.items():
            if variable in by_variable:
                values[by_variable[variable]] = value
            elif variable.startswith(PREFIX) and not any(part in variable for part in SERVICE_LINKS):
                hint = self._hint(variable, list(by_variable))
                raise InputError(f"there is no setting for the variable {variable}; {hint}")
        return values

    def _from_flags(self, flags: Mapping[str, str]) -> dict[str, str]:
        known = list(self.names())
        for name in flags:
            if name not in known:
                raise InputError(f"--set: there is no setting `{name}`; {self._hint(name, known)}")
        return dict(flags)

    # ---- errors -----------------------------------------------------------------------------------------------------

    def _reject_unknown(self, tree: dict[Any, Any], of: type[msgspec.Struct], source: str, prefix: str) -> None:
        known = [field.name for field in msgspec.structs.fields(of)]
        for key, value in tree.items():
            if key not in known:
                hint = self._hint(f"{prefix}{key}", [*self.names(), *(f"{prefix}{name}" for name in known)])
                raise InputError(f"{source}: there is no setting `{prefix}{key}`; {hint}")
            section = _section(of, key)
            if section is not None and isinstance(value, dict):
                self._reject_unknown(value, section, source, f"{prefix}{key}.")

    def _explain_invalid(
        self, error: msgspec.ValidationError, tree: dict[Any, Any], source: str, overrides: Mapping[str, str]
    ) -> str:
        """Name the setting, what it expects and the value that was written. A flag or variable has no file to name."""
        problem = decode_problem(error)
        name = problem.path.partition("[")[0]
        choices = _choices(self._tree, name)
        expected = f"expected one of {', '.join(choices)}" if choices else problem.problem
        where = "" if name in overrides else f"{source}: "
        value = _shown(_lookup(tree, name))
        hint = f"`{self._command} --show-settings` explains every setting"
        return f"{where}setting `{problem.path}`: {expected}, got {value}; {hint}"

    def _hint(self, word: str, known: list[str]) -> str:
        nearest = _nearest(word, known)
        return f"{f'did you mean `{nearest}`? ' if nearest else ''}`{self._command} --show-settings` lists them all"


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
    """The docstring under each field of a settings class, which users read too."""
    body = ast.parse(inspect.getsource(of)).body[0]
    assert isinstance(body, ast.ClassDef)
    meanings = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            meanings[field.target.id] = str(ast.literal_eval(text.value))
    return meanings


# ---- trees of settings ----------------------------------------------------------------------------------------------


_hints = cache(get_type_hints)


def _fields(of: type[msgspec.Struct], prefix: str) -> Iterator[tuple[str, Any, bool]]:
    """Dotted name, default, and whether it is a list."""
    hints = _hints(of)
    for field in msgspec.structs.fields(of):
        section = _section(of, field.name)
        if section is not None:
            yield from _fields(section, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", field.default, get_origin(hints[field.name]) is tuple


def _section(of: type[msgspec.Struct], name: str) -> type[msgspec.Struct] | None:
    hint = _hints(of)[name]
    return hint if isinstance(hint, type) and issubclass(hint, msgspec.Struct) else None


def _choices(of: type[msgspec.Struct], name: str) -> tuple[str, ...]:
    """The words that a setting allows; empty when it takes any value of its type."""
    head, _, rest = name.partition(".")
    hint = _hints(of).get(head)
    if rest:
        section = _section(of, head)
        return _choices(section, rest) if section is not None else ()
    return get_args(hint) if get_origin(hint) is Literal else ()


def _nearest(word: str, known: list[str]) -> str:
    """The known name that was probably meant; "" when none is near. A forgotten section (`keep` for `filter.keep`) is
    the likeliest slip."""
    same_end = [name for name in known if name.rpartition(".")[2] == word.rpartition(".")[2]]
    return next(iter(same_end or get_close_matches(word, known, n=1)), "")


def _set(tree: dict[Any, Any], name: str, value: str | list[str]) -> dict[Any, Any]:
    head, _, rest = name.partition(".")
    if not rest:
        return {**tree, head: value}
    section = tree.get(head)
    return {**tree, head: _set(section if isinstance(section, dict) else {}, rest, value)}


def _lookup(tree: Any, name: str) -> Any:
    """The value under a dotted name, as far down as the tree goes."""
    for part in name.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else tree
    return tree


def _get(settings: msgspec.Struct, name: str) -> Any:
    value: Any = settings
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _shown(value: Any) -> str:
    return shortened(msgspec.json.encode(value).decode(errors="replace"))
