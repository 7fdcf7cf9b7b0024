"""YAML to values; with `yaml_values`, the only place that parses it.

libyaml is asked for events, and values are built of them here. So a document is bounded before anything is built: its
size, its depth, and how many values it has once every alias and merge key is written out. Keys are always text, as in
JSON. Dates and base-60 numbers (`1:30`) stay text, as in the API server's reading; Python objects do not exist.
"""

from typing import IO, Any

import msgspec

from gputile.model.errors import GputileError


class DocumentLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a document may be."""

    size: int = 4 * 2**20  # bytes or characters
    values: int = 100_000
    from_aliases: int = 100_000  # values that are there only because an alias repeats them
    depth: int = 100  # lists and mappings inside each other; a pod has about fifteen
    unique: bool = False  # whether a key that stands there twice is a slip


SETTINGS = DocumentLimits()
"""Settings, kubeconfigs, CDI specs: files of some kilobytes."""

MANIFESTS = DocumentLimits(size=128 * 2**20, values=10_000_000)
"""A whole cluster, as kubectl prints it."""


class NotYaml(GputileError):
    """Text that is not the YAML that it should be: what is wrong with it, and in which line (0: nobody knows)."""

    def __init__(self, problem: str, line: int = 0) -> None:
        super().__init__(problem)
        self.problem, self.line = problem, line


def read_one(text: str | bytes, limits: DocumentLimits = SETTINGS) -> Any:
    """The value of text with at most one document; None when it has none."""
    found = read_all(text, limits)
    if len(found) > 1:
        raise NotYaml("there is more than one document in it")
    return found[0] if found else None


def read_all(text: str | bytes, limits: DocumentLimits = MANIFESTS) -> list[Any]:
    """The values of all documents."""
    if len(text) > limits.size:
        raise NotYaml(f"it has more than {limits.size} bytes")
    from gputile.text.yaml_values import built  # PyYAML is slow to load, and most commands read JSON

    return built(text, limits)


def content(file: IO[bytes], limits: DocumentLimits = MANIFESTS) -> bytes:
    """What is in the file, if it is not too much; a file may be a device that never ends."""
    found = file.read(limits.size + 1)
    if len(found) > limits.size:
        raise NotYaml(f"it has more than {limits.size} bytes")
    return found
