"""A cache of rejections that kube-scheduler's repeated filter calls are answered from until free capacity appears.

It holds the last answer to each request that fitted on no node, as the bytes of the response.

kube-scheduler retries a rejected pod after any change of the cluster. A queue of pending pods, the normal state of a
GPU cluster, is a steady stream of filter calls that are all rejected. While free capacity only shrinks, a rejection
stays valid: the same nodes are refused, eviction would help on the same ones, and every given reason still holds
(another may hold as well). Two reasons are exceptions: that the containers do not fit together, and that the search was
not continued. A container may soon not fit alone, and a bounded search may find in a smaller cluster what it missed. An
answer with such a reason is valid only until anything changes.

Quota is part of the key: a request carries what its namespace may hold now (`QuotaConstraint`). When quota is freed or
used up, the request is another one.

Pods with capacity that other pods cannot use (a reservation, a nomination) must not be answered from this cache.
"""

from collections.abc import Mapping

import msgspec

from gputile.engine.fleet.fleet import Fleet
from gputile.model.refusals import NodeReason
from gputile.model.requests import PodRequest
from gputile.scheduler.extender_api import FilterAnswer, FilterArgs, write_filter

SEARCHED = frozenset({NodeReason.TOGETHER, NodeReason.SEARCH})
MOST = 64  # answers; one for 5,000 nodes takes half a megabyte


class CachedRejection(msgspec.Struct, frozen=True):
    """An answer that rejects a pod, and the number of refused nodes per reason."""

    answer: FilterAnswer
    reasons: Mapping[NodeReason, int]

    @property
    def main_reason(self) -> NodeReason:
        """The reason of the most nodes; that a node has no cards counts only if there is no other reason."""
        return max(self.reasons, key=lambda reason: (reason is not NodeReason.NO_CARDS, self.reasons[reason]))


class RequestEntry(msgspec.Struct, frozen=True):
    """The rejections of one request, all made since free capacity last appeared."""

    capacity_generation: int
    answers: dict[frozenset[str], tuple[int, CachedRejection]] = msgspec.field(default_factory=dict)
    """By the candidate nodes: the generation of the fleet, and the rejection."""


class RefusalCache:
    """Rejections by request and candidate nodes, valid for one generation of the fleet's capacity."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._entries: dict[PodRequest, RequestEntry] = {}
        self._count = 0

    def get(self, request: PodRequest, args: FilterArgs) -> CachedRejection | None:
        """The valid rejection of such a request for these nodes, in whatever order they are named."""
        entry = self._entries.get(request)
        if entry is None or entry.capacity_generation != self._fleet.capacity_generation():
            return None
        generation, rejection = entry.answers.get(_node_set(args), (-1, None))
        if rejection is None or (not SEARCHED.isdisjoint(rejection.reasons) and generation != self._fleet.generation()):
            return None
        return rejection

    def put(self, request: PodRequest, args: FilterArgs, rejection: CachedRejection) -> None:
        """Cache a rejection that was just made."""
        nodes, capacity_generation = _node_set(args), self._fleet.capacity_generation()
        if not nodes:
            return
        if self._count >= MOST:
            self._entries.clear()
            self._count = 0
        entry = self._entries.get(request)
        if entry is None or entry.capacity_generation != capacity_generation:
            entry = self._entries[request] = RequestEntry(capacity_generation)
        answer = msgspec.structs.replace(rejection.answer, encoded=write_filter(rejection.answer, args))
        entry.answers[nodes] = self._fleet.generation(), msgspec.structs.replace(rejection, answer=answer)
        self._count += 1


def _node_set(args: FilterArgs) -> frozenset[str]:
    """The candidate nodes. Empty, which means that nothing is cached, if a node is named twice, or if node objects were
    sent, because the response must contain them."""
    if args.node_objects is not None:
        return frozenset()
    names = frozenset(args.names)
    return names if len(names) == len(args.names) else frozenset()
