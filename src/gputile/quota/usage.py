"""Quota usage: what namespaces hold of their quotas, as running sums by namespace and model.

The ledger calls `charge` and `refund` as it holds and releases. A filter call asks once, with `allowed`, before it
looks for a node; the ledger asks `objection` when the pod is reserved there. The sums are rebuilt from the ledger when
the quotas change; without quotas nothing is counted.

A pod is charged once, for what holds its capacity: reservation, assumed bind, confirmed grant or nomination. A pod
whose node is gone, or whose card is no longer listed there, keeps its cost until the pod is gone as well.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import reduce

from gputile.engine.cooperative import Cooperative
from gputile.engine.explanation import Allow, Explanation, explain_cooperatively
from gputile.engine.fleet.fleet import Fleet
from gputile.engine.search_budget import SearchBudget
from gputile.engine.victims import RequestAfterEviction, Victim
from gputile.model.allocations import Allocation
from gputile.model.cards import Node
from gputile.model.requests import PodRequest
from gputile.quota.arithmetic import Spent, add, cost_of, overrun, subtract
from gputile.quota.constraint import QuotaConstraint
from gputile.quota.limits import DEFAULT_KEY, Amount, Quota, Quotas, quota_of

KNOWN = 2000  # answers that are cached


class QuotaUsage:
    """What each namespace with a quota holds, and what its quota still allows."""

    def __init__(self, fleet: Fleet) -> None:
        self.quotas: Quotas = {}
        self._fleet, self._constraint = fleet, QuotaConstraint(fleet)
        self._costs: dict[str, tuple[str, Spent]] = {}  # by pod
        self._held: dict[str, dict[str, Amount]] = {}  # by namespace
        self._pods: dict[str, set[str]] = {}  # by namespace
        self._changes: dict[str, int] = {}  # by namespace: the number of its last change; 0: it holds nothing
        self._counter = itertools.count(1)
        self._known: dict[tuple[str, PodRequest], tuple[object, PodRequest]] = {}

    # ---- updates ----------------------------------------------------------------------------------------------------

    def set(self, quotas: Quotas, allocations: Iterable[Allocation]) -> None:
        """Replace the quotas; `allocations` are all allocations of the ledger."""
        self.quotas, former = dict(quotas), dict(self._costs)
        for cache in (self._costs, self._held, self._pods, self._changes, self._known):
            cache.clear()
        for allocation in allocations if self.quotas else ():
            self._charge(allocation, former.get(allocation.pod))

    def charge(self, allocation: Allocation) -> None:
        self._charge(allocation, self._costs.get(allocation.pod))

    def _charge(self, allocation: Allocation, before: tuple[str, Spent] | None) -> None:
        """`before`: its former cost, which it keeps while its node or a card of it is unknown."""
        namespace = _namespace(allocation)
        if allocation.grant is None or self.quota(namespace) is None:
            return
        self.refund(allocation.pod)
        spent = before[1] if before is not None and not self._is_known(allocation) else self._cost(allocation)
        self._costs[allocation.pod] = namespace, spent
        self._pods.setdefault(namespace, set()).add(allocation.pod)
        self._hold(namespace, add(self._held.get(namespace, {}), spent))

    def refund(self, pod: str) -> None:
        namespace, spent = self._costs.pop(pod, ("", None))
        if spent is not None:
            self._pods[namespace].discard(pod)
            self._hold(namespace, subtract(self._held.get(namespace, {}), spent))

    def _hold(self, namespace: str, spent: dict[str, Amount]) -> None:
        self._held[namespace], self._changes[namespace] = spent, next(self._counter)
        if not spent and not self._pods.get(namespace):  # namespaces are created and deleted
            for cache in (self._held, self._changes, self._pods):
                cache.pop(namespace, None)

    def _is_known(self, allocation: Allocation) -> bool:
        """Whether its node is known with all cards that it holds; grants for other nodes hold no cards here."""
        node = self._fleet.node(allocation.node)
        cards = {card.uuid for card in node.cards} if node is not None else set()
        return allocation.grant is not None and set(allocation.grant.uses()) <= cards

    def _cost(self, allocation: Allocation) -> Spent:
        node = self._fleet.node(allocation.node)
        return {} if node is None or allocation.grant is None else cost_of(allocation.grant, node)

    # ---- queries ----------------------------------------------------------------------------------------------------

    def quota(self, namespace: str) -> Quota | None:
        return quota_of(namespace, self.quotas)

    def held(self, namespace: str) -> Spent:
        return self._held.get(namespace, {})

    def scope(self, namespace: str) -> str:
        """What tells equal requests of two namespaces apart; "" while there are no quotas."""
        return namespace if self.quotas else ""

    def namespaces(self) -> list[str]:
        """Namespaces with a quota of their own, and those that hold something under the default quota."""
        return sorted(
            {name for name in self.quotas if name != DEFAULT_KEY} | {name for name, held in self._held.items() if held}
        )

    def allowed(self, namespace: str, asked: PodRequest, ignoring: Collection[str] = ()) -> PodRequest:
        """The request with its allowance: the same object where no quota applies. What the pods `ignoring` (UIDs) hold
        does not count."""
        quota = self.quota(namespace) if self.quotas else None
        if quota is None:
            return asked
        if not self._pods.get(namespace, set()).isdisjoint(ignoring):
            return self._constraint.request(asked, quota, self._held_without(namespace, ignoring))
        key, now = (namespace, asked), (self._changes.get(namespace, 0), len(self._fleet.card_kinds()))
        then, allowed = self._known.get(key, (None, asked))
        if then != now:
            if len(self._known) >= KNOWN:
                self._known.clear()
            allowed = self._constraint.request(asked, quota, self.held(namespace))
            self._known[key] = now, allowed
        return allowed

    def after_eviction(
        self,
        namespace: str,
        asked: PodRequest,
        is_leaving: Callable[[str], bool] = lambda pod: False,
        ignoring: Collection[str] = (),
    ) -> RequestAfterEviction:
        """The same after evictions, for the search for victims. Only pods of the namespace give quota back. Those that
        are leaving (by UID), on any node, count as gone already."""
        if self.allowed(namespace, asked, ignoring) is asked:
            return lambda evicted: asked
        gone = {*ignoring, *(pod for pod in self._pods.get(namespace, ()) if is_leaving(pod))}
        return lambda evicted: self.allowed(namespace, asked, gone.union(victim.pod for victim in evicted))

    def explain(
        self,
        namespace: str,
        asked: PodRequest,
        fleet: Fleet,
        holders: Mapping[str, Iterable[Victim]],
        look_at: int | None = None,
        budget: SearchBudget | None = None,
        ignoring: Collection[str] = (),
    ) -> Cooperative[Explanation]:
        """Why such a pod is pending, and the changes that would help within the quota of its namespace."""
        allow: Allow = lambda changed: self.allowed(namespace, changed.allowed(None), ignoring)  # noqa: E731
        after = self.after_eviction(namespace, asked, ignoring=ignoring)
        allowed = self.allowed(namespace, asked, ignoring)
        return explain_cooperatively(allowed, fleet, holders, look_at, after=after, allow=allow, budget=budget)

    def _held_without(self, namespace: str, pods: Iterable[str]) -> Spent:
        """What the namespace holds without these pods."""
        spent = (self._costs[pod][1] for pod in self._pods.get(namespace, set()).intersection(pods))
        return reduce(subtract, spent, self.held(namespace))

    def objection(self, allocation: Allocation, node: Node | None = None, ignoring: Collection[str] = ()) -> str:
        """Why the quota forbids this allocation; "" when it allows it. What the pod holds already is not counted twice,
        and what the pods `ignoring` (UIDs) hold does not count.

        `node`: the node, if it is not in the fleet (yet).
        """
        namespace = _namespace(allocation)
        quota, node = self.quota(namespace), node or self._fleet.node(allocation.node)
        if quota is None or node is None or allocation.grant is None:
            return ""
        if not quota.admits_pool(node.pool):
            return f"{_pool_sentence(namespace, quota, node.pool)}; {_advice(namespace, quota)}"
        held = self._held_without(namespace, {allocation.pod, *ignoring})
        exceeded = overrun(quota, held, cost_of(allocation.grant, node))
        return "" if exceeded is None else f"{exceeded.sentence(namespace)}; {_advice(namespace, quota)}"

    def objections(self, namespace: str, asked: PodRequest) -> list[str]:
        """Why quota keeps such a pod pending, and what to do; empty when it does not."""
        quota = self.quota(namespace)
        if quota is None:
            return []
        overruns = self._constraint.objections(asked, quota, self.held(namespace))
        lines = [over.sentence(namespace) for over in overruns]
        lines += [f"{namespace} may use nodes of {_pools(quota)} only"] if quota.pools else []
        return [*lines, _advice(namespace, quota)] if overruns else lines

    # ---- audit ------------------------------------------------------------------------------------------------------

    def is_right(self, allocations: Iterable[Allocation]) -> bool:
        """Whether these, which are all allocations of the ledger, are charged what they cost, and the sums agree."""
        charged = {a.pod: a for a in allocations if a.grant is not None and self.quota(_namespace(a)) is not None}
        costs_right = all(
            self._costs.get(pod) == (_namespace(a), self._cost(a)) or not self._is_known(a)
            for pod, a in charged.items()
        )
        sums: dict[str, Spent] = {}
        for namespace, spent in self._costs.values():
            sums[namespace] = add(sums.get(namespace, {}), spent)
        sums_right = all(self.held(name) == sums.get(name, {}) for name in {*self._held, *sums})
        return costs_right and sums_right and charged.keys() == self._costs.keys()


def _namespace(allocation: Allocation) -> str:
    return allocation.name.partition("/")[0]


def _pools(quota: Quota) -> str:
    return f"pool{'s' if len(quota.pools) > 1 else ''} {', '.join(quota.pools)}"


def _pool_sentence(namespace: str, quota: Quota, pool: str) -> str:
    actual = f"pool {pool}" if pool else "no pool"
    return f"{namespace} may use nodes of {_pools(quota)} only, and this node is of {actual}"


def _advice(namespace: str, quota: Quota) -> str:
    where = f" in {quota.source}" if quota.source else ""
    return f"wait until a pod of {namespace} ends, or raise its quota{where}"
