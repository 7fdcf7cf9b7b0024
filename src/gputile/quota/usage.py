"""What namespaces hold of what their quotas count, as running sums.

Room:  what each pod of a namespace with a quota costs, and their sums by namespace and model. Made anew from the book
       whenever the quotas change; while there are none nothing is kept, and the book does not ask.
Door:  `charge` and `refund`, which the book calls as it holds and releases; `allowed`, `after_eviction` and
       `objection` for those who ask.

A pod is charged once, for what holds its room: pencil, assumption, confirmed grant or promise. One whose node is gone,
or whose card is no longer listed there, goes on costing what it did, until the pod is gone as well.
"""

import itertools
from collections.abc import Callable, Collection, Iterable

from gputile.engine.fleet.fleet import Fleet
from gputile.model.allocations import Allocation
from gputile.model.cards import Node
from gputile.model.quotas import EVERYBODY, Amount, Quota, Quotas, quota_of
from gputile.model.requests import PodRequest
from gputile.quota.arithmetic import Spent, add, cost_of, overrun, subtract
from gputile.quota.constraint import QuotaConstraint

KNOWN = 2000  # answers that are remembered

RequestAfterEviction = Callable[[Collection[str]], PodRequest]
"""What a pod may ask for once these pods (UIDs) have left: those of its own namespace give quota back."""


class QuotaUsage:
    """See the module's text."""

    def __init__(self, fleet: Fleet) -> None:
        self.quotas: Quotas = {}
        self._fleet, self._allowing = fleet, QuotaConstraint(fleet)
        self._costs: dict[str, tuple[str, Spent]] = {}  # by pod
        self._held: dict[str, dict[str, Amount]] = {}  # by namespace
        self._pods: dict[str, set[str]] = {}  # by namespace
        self._turns: dict[str, int] = {}  # by namespace: when what it holds last changed; 0: it holds nothing
        self._counter = itertools.count(1)
        self._known: dict[tuple[str, PodRequest], tuple[object, PodRequest]] = {}

    # ---- keeping ----------------------------------------------------------------------------------------------------

    def set(self, quotas: Quotas, allocations: Iterable[Allocation]) -> None:
        """Other quotas are in force; these are all who hold anything."""
        self.quotas, former = dict(quotas), dict(self._costs)
        for memory in (self._costs, self._held, self._pods, self._turns, self._known):
            memory.clear()
        for allocation in allocations if self.quotas else ():
            self._charge(allocation, former.get(allocation.pod))

    def charge(self, allocation: Allocation) -> None:
        self._charge(allocation, self._costs.get(allocation.pod))

    def _charge(self, allocation: Allocation, before: tuple[str, Spent] | None) -> None:
        """`before`: what it cost, and goes on costing while its node, or a card of it, is not to be seen."""
        namespace = _namespace(allocation)
        if allocation.grant is None or self.quota(namespace) is None:
            return
        self.refund(allocation.pod)
        spent = before[1] if before is not None and not self._is_seen(allocation) else self._cost(allocation)
        self._costs[allocation.pod] = namespace, spent
        self._pods.setdefault(namespace, set()).add(allocation.pod)
        self._hold(namespace, add(self._held.get(namespace, {}), spent))

    def refund(self, pod: str) -> None:
        namespace, spent = self._costs.pop(pod, ("", None))
        if spent is not None:
            self._pods[namespace].discard(pod)
            self._hold(namespace, subtract(self._held.get(namespace, {}), spent))

    def _hold(self, namespace: str, spent: dict[str, Amount]) -> None:
        self._held[namespace], self._turns[namespace] = spent, next(self._counter)
        if not spent and not self._pods.get(namespace):  # namespaces come and go
            for memory in (self._held, self._turns, self._pods):
                memory.pop(namespace, None)

    def _is_seen(self, allocation: Allocation) -> bool:
        """Whether we see its node with all cards that it holds; grants of other nodes hold none here."""
        node = self._fleet.node(allocation.node)
        cards = {card.uuid for card in node.cards} if node is not None else set()
        return allocation.grant is not None and set(allocation.grant.uses()) <= cards

    def _cost(self, allocation: Allocation) -> Spent:
        node = self._fleet.node(allocation.node)
        return {} if node is None or allocation.grant is None else cost_of(allocation.grant, node)

    # ---- asking -----------------------------------------------------------------------------------------------------

    def quota(self, namespace: str) -> Quota | None:
        return quota_of(namespace, self.quotas)

    def held(self, namespace: str) -> Spent:
        return self._held.get(namespace, {})

    def pods(self, namespace: str) -> Collection[str]:
        """The UIDs of those who are charged."""
        return self._pods.get(namespace, ())

    def namespaces(self) -> list[str]:
        """Those with a quota of their own, and those that hold something under everybody's."""
        return sorted(
            {name for name in self.quotas if name != EVERYBODY} | {n for n, held in self._held.items() if held}
        )

    def allowed(self, namespace: str, asked: PodRequest) -> PodRequest:
        """What the pod may ask for now: the very same where no quota stands in its way."""
        quota = self.quota(namespace) if self.quotas else None
        if quota is None:
            return asked
        key, now = (namespace, asked), (self._turns.get(namespace, 0), len(self._fleet.makes()))
        then, found = self._known.get(key, (None, asked))
        if then != now:
            if len(self._known) >= KNOWN:
                self._known.clear()
            found = self._allowing.request(asked, quota, self.held(namespace))
            self._known[key] = now, found
        return found

    def after_eviction(self, namespace: str, asked: PodRequest) -> RequestAfterEviction:
        """The same, as things are now, for those who weigh who might leave."""
        quota, held = self.quota(namespace), self.held(namespace)
        if quota is None:
            return lambda gone: asked
        return lambda gone: self._allowing.request(asked, quota, self._without(held, namespace, gone))

    def _without(self, held: Spent, namespace: str, gone: Collection[str]) -> Spent:
        for pod in gone:
            whose, spent = self._costs.get(pod, ("", {}))
            if whose == namespace:
                held = subtract(held, spent)
        return held

    def objection(self, allocation: Allocation, node: Node | None = None) -> str:
        """Why the pod may not hold this, in words; "" when it may. What it holds already is not counted twice.

        `node`: where it is, if that is not in the fleet (yet).
        """
        namespace = _namespace(allocation)
        quota, node = self.quota(namespace), node or self._fleet.node(allocation.node)
        if quota is None or node is None or allocation.grant is None:
            return ""
        if not quota.admits_pool(node.pool):
            return f"{_pool_sentence(namespace, quota, node.pool)}; {_advice(namespace, quota)}"
        held = self._without(self.held(namespace), namespace, [allocation.pod])
        found = overrun(quota, held, cost_of(allocation.grant, node))
        return "" if found is None else f"{found.sentence(namespace)}; {_advice(namespace, quota)}"

    def objections(self, namespace: str, asked: PodRequest) -> list[str]:
        """Why quota keeps such a pod waiting, and what to do; nothing when it does not."""
        quota = self.quota(namespace)
        if quota is None:
            return []
        found = self._allowing.objections(asked, quota, self.held(namespace))
        told = [over.sentence(namespace) for over in found]
        told += [f"{namespace} may use nodes of {_pools(quota)} only"] if quota.pools else []
        return [*told, _advice(namespace, quota)] if found else told

    # ---- audit ------------------------------------------------------------------------------------------------------

    def is_right(self, allocations: Iterable[Allocation]) -> bool:
        """Whether these, who are all who hold anything, are charged what they cost, and the sums are theirs."""
        charged = {h.pod: h for h in allocations if h.grant is not None and self.quota(_namespace(h)) is not None}
        fair = all(
            self._costs.get(pod) == (_namespace(h), self._cost(h)) or not self._is_seen(h) for pod, h in charged.items()
        )
        sums: dict[str, Spent] = {}
        for namespace, spent in self._costs.values():
            sums[namespace] = add(sums.get(namespace, {}), spent)
        adds_up = all(self.held(name) == sums.get(name, {}) for name in {*self._held, *sums})
        return fair and adds_up and charged.keys() == self._costs.keys()


def _namespace(allocation: Allocation) -> str:
    return allocation.name.partition("/")[0]


def _pools(quota: Quota) -> str:
    return f"pool{'s' if len(quota.pools) > 1 else ''} {', '.join(quota.pools)}"


def _pool_sentence(namespace: str, quota: Quota, pool: str) -> str:
    there = f"pool {pool}" if pool else "no pool"
    return f"{namespace} may use nodes of {_pools(quota)} only, and this node is of {there}"


def _advice(namespace: str, quota: Quota) -> str:
    where = f" in {quota.source}" if quota.source else ""
    return f"wait until a pod of {namespace} ends, or have its quota raised{where}"
