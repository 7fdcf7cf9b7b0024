"""Answers no, remembered until room appears.

Room:  what was last answered to each kind of pod that fitted nowhere, as it went over the wire.
Door:  `RefusalCache.again` finds the answer to the same question; `RefusalCache.keep` remembers one.

kube-scheduler tries a pod that an extender refused again on any change of the cluster. A queue of waiting pods, the
normal state of a GPU cluster, is a steady rain of questions that all end in no. While room only shrinks a no stays a
no: the same nodes are refused, eviction would cure the same ones, and every reason given still holds (another may hold
by now as well). Except that containers do not fit together, or were not searched for any further: each may soon not
fit alone, and a bounded search may find in a smaller cluster what it missed. An answer with such a reason is kept only
as long as nothing changes at all.

Quota is part of the question: a request carries what its namespace may have now (`Allowance`). When quota frees, or is
used up, it is another question.

Who has room of its own that others do not see (a pencil, a promise) must not ask here.
"""

from collections.abc import Mapping

import msgspec

from gputile.engine.fleet.fleet import Fleet
from gputile.model.refusals import NodeReason
from gputile.model.requests import PodRequest
from gputile.scheduler.extender_api import FilterAnswer, FilterArgs, write_filter

SEARCHED = frozenset({NodeReason.TOGETHER, NodeReason.SEARCH})
MOST = 64  # answers; one about 5,000 nodes has half a megabyte


class CachedRejection(msgspec.Struct, frozen=True):
    """One answer, and how many nodes it refuses for which reason."""

    answer: FilterAnswer
    reasons: Mapping[NodeReason, int]

    @property
    def main_reason(self) -> NodeReason:
        """What refuses the most nodes, those without any card left aside if there are others."""
        return max(self.reasons, key=lambda code: (code is not NodeReason.NO_CARDS, self.reasons[code]))


class RequestEntry(msgspec.Struct, frozen=True):
    """The answers to pods that ask the same, all made since room last appeared."""

    capacity_generation: int
    answers: dict[frozenset[str], tuple[int, CachedRejection]] = msgspec.field(default_factory=dict)
    """By the nodes that were asked about: the moment, and the answer."""


class RefusalCache:
    """See the module's text."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._shapes: dict[PodRequest, RequestEntry] = {}
        self._kept = 0

    def again(self, asked: PodRequest, args: FilterArgs) -> CachedRejection | None:
        """What was said to such a pod about these nodes, in whatever order they are named, if it still holds."""
        shape = self._shapes.get(asked)
        if shape is None or shape.capacity_generation != self._fleet.capacity_generation():
            return None
        moment, said = shape.answers.get(_nodes(args), (-1, None))
        if said is None or (not SEARCHED.isdisjoint(said.reasons) and moment != self._fleet.generation()):
            return None
        return said

    def keep(self, asked: PodRequest, args: FilterArgs, said: CachedRejection) -> None:
        """Remember an answer just made."""
        nodes, capacity_generation = _nodes(args), self._fleet.capacity_generation()
        if not nodes:
            return
        if self._kept >= MOST:
            self._shapes.clear()
            self._kept = 0
        shape = self._shapes.get(asked)
        if shape is None or shape.capacity_generation != capacity_generation:
            shape = self._shapes[asked] = RequestEntry(capacity_generation)
        answer = msgspec.structs.replace(said.answer, written=write_filter(said.answer, args))
        shape.answers[nodes] = self._fleet.generation(), msgspec.structs.replace(said, answer=answer)
        self._kept += 1


def _nodes(args: FilterArgs) -> frozenset[str]:
    """Whom it was asked about. Empty, which means that no answer is kept, where one is named twice, or they came whole
    and want to be answered whole."""
    if args.whole is not None:
        return frozenset()
    named = frozenset(args.names)
    return named if len(named) == len(args.names) else frozenset()
