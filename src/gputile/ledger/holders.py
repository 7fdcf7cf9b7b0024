"""The pods on each node as candidates for eviction, for `engine.explanation`."""

from collections.abc import Iterator, Mapping

from gputile.engine.victims import Victim
from gputile.ledger.ledger import Ledger


class NodeAllocations(Mapping[str, list[Victim]]):
    """The pods on each node, read from the ledger on access."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __getitem__(self, node: str) -> list[Victim]:
        return self._ledger.holders(node)

    def __contains__(self, node: object) -> bool:
        return isinstance(node, str) and node in self._ledger.fleet

    def __iter__(self) -> Iterator[str]:
        return iter(self._ledger.fleet.names())

    def __len__(self) -> int:
        return len(self._ledger.fleet)
