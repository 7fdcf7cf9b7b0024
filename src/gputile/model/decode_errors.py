"""Errors of decoders and of the operating system, in sentences of our own.

A user never reads "Expected `int`, got `str` - at `$.filter.keep`" or "[Errno 2] ...": `decode_problem` and
`file_problem` name the field, what was expected and what was there. What they do not recognize they describe in
general words; they never pass a library's sentence on.
"""

import re

import msgspec

KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "nothing",
}
AT = re.compile(r" - at (`key` in )?`\$([^`]*)`$")
MISMATCH = re.compile(r"Expected `([^`]+)`(?:, got `([^`]+)`| (.+))?$")
MISSING = re.compile(r"Object missing required field `(.*)`$", re.DOTALL)
UNKNOWN = re.compile(r"Object contains unknown field `(.*)`$", re.DOTALL)
ENUM = re.compile(r"Invalid enum value (.*)$", re.DOTALL)
BYTE = re.compile(r"\(byte (\d+)\)")
LONGEST = 60  # characters of a value that an error repeats


class DecodeProblem(msgspec.Struct, frozen=True):
    """What is wrong with a decoded document: in which field, what was expected there, and what was found."""

    path: str  # such as `spec.containers[0].name`; "" for the document itself
    problem: str
    got: str = ""  # the kind of the value that was there; "" where the problem says it all

    def __str__(self) -> str:
        text = f"{self.problem}, got {self.got}" if self.got else self.problem
        return f"`{self.path}`: {text}" if self.path else text


def decode_problem(error: Exception) -> DecodeProblem:
    """Translate what msgspec raises. Text that is no valid JSON, or is nested too deeply, has no path."""
    if isinstance(error, RecursionError):
        return DecodeProblem("", "lists and mappings are nested too deeply")
    if isinstance(error, UnicodeError):
        return DecodeProblem("", "it is not UTF-8 text")
    message = str(error)
    if not isinstance(error, msgspec.ValidationError):
        byte = BYTE.search(message)
        return DecodeProblem("", f"invalid JSON at byte {byte[1]}" if byte else "the JSON ends too early")
    at = AT.search(message)
    path = at[2].removeprefix(".") if at else ""
    problem, got = _mismatch(message[: at.start()] if at else message)
    return DecodeProblem(path, f"a key: {problem}" if at and at[1] else problem, got)


def _mismatch(message: str) -> tuple[str, str]:
    """What was expected or is wrong, and the kind of value that was there."""
    if match := MISMATCH.match(message):
        limit = f" ({match[3]})" if match[3] else ""
        return f"expected {_kind(match[1])}{limit}", _kind(match[2]) if match[2] else ""
    if match := MISSING.match(message):
        return f"the field `{shortened(match[1])}` is missing", ""
    if match := UNKNOWN.match(message):
        return f"the field `{shortened(match[1])}` does not exist", ""
    if match := ENUM.match(message):
        return f"{shortened(match[1])} is not an allowed value", ""
    return ("the number is out of range" if "out of range" in message else "the value has the wrong form"), ""


def _kind(names: str) -> str:
    """`int | float | null` is "a number": a field that may be null may as well be absent."""
    kinds = names.removesuffix(" | null").replace("int | float", "float").split(" | ")
    return " or ".join(KINDS.get(kind, "another value") for kind in kinds)


def file_problem(error: Exception) -> str:
    """Why a file could not be read or written. Errors of our own already are sentences."""
    if isinstance(error, OSError):
        reason = error.strerror or "the file system reports an error"
        return reason[:1].lower() + reason[1:]
    if isinstance(error, UnicodeError | msgspec.MsgspecError | RecursionError):
        return str(decode_problem(error))
    if isinstance(error, TypeError | OverflowError):  # values that YAML has and JSON lacks
        return "it has a value that JSON cannot express"
    return str(error)


def shortened(text: str, longest: int = LONGEST) -> str:
    """A user's text, cut to a readable length and without control characters."""
    cut = text if len(text) <= longest else f"{text[:longest]}..."
    return cut if cut.isprintable() else repr(cut)[1:-1]
