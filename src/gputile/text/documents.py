"""YAML to values; with `yaml_values`, the only place that parses it.

libyaml emits events, and `yaml_values` builds the values from them. So a document is bounded before anything is built:
its size, its depth, and its number of values once every alias and merge key is expanded. Keys are always strings, as in
JSON. Dates and base-60 numbers (`1:30`) stay strings, as the API server reads them; tags of Python objects are errors.
"""

from typing import IO, Any

import msgspec

from gputile.model.errors import GputileError


class DocumentLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a document."""

    size: int = 4 * 2**20  # bytes or characters
    values: int = 100_000
    from_aliases: int = 100_000  # values that only aliases repeat
    depth: int = 100  # levels of lists and mappings; a pod has about fifteen
    unique: bool = False  # whether a duplicate key is an error


SETTINGS = DocumentLimits()
"""Settings, kubeconfigs, CDI specs: files of some kilobytes."""

MANIFESTS = DocumentLimits(size=128 * 2**20, values=10_000_000)
"""A whole cluster, as kubectl prints it."""


class NotYaml(GputileError):
    """Invalid YAML, or YAML beyond the limits: the problem, and its line (0: unknown)."""

    def __init__(self, problem: str, line: int = 0) -> None:
        super().__init__(problem)
        self.problem, self.line = problem, line


def read_one(text: str | bytes, limits: DocumentLimits = SETTINGS) -> Any:
    """The value of text with at most one document; None when it has none."""
    documents = read_all(text, limits)
    if len(documents) > 1:
        raise NotYaml("it has more than one document; keep one")
    return documents[0] if documents else None


def read_all(text: str | bytes, limits: DocumentLimits = MANIFESTS) -> list[Any]:
    """The values of all documents."""
    if len(text) > limits.size:
        raise NotYaml(f"it has more than {limits.size} bytes")
    from gputile.text.yaml_values import built  # PyYAML is slow to load, and most commands read JSON

    return built(text, limits)


def content(file: IO[bytes], limits: DocumentLimits = MANIFESTS) -> bytes:
    """The content of the file, up to the limit; a file may be a device that never ends."""
    data = file.read(limits.size + 1)
    if len(data) > limits.size:
        raise NotYaml(f"it has more than {limits.size} bytes")
    return data
