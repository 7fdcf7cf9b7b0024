"""Explanations: why a pod is pending and what would help, in the same words for Events, terminal and API.

`explain` counts the reasons over all nodes, gives the nearest misses with numbers, and looks for the smallest change
after which the pod fits. It suggests a change only after it has tried the changed request. One search budget covers all
of it, and the explanation says so when the budget runs out. `explain_cooperatively` does the same work with
interruptions.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import msgspec

from gputile.engine.cooperative import Cooperative, run_to_end
from gputile.engine.fleet.fleet import Fleet
from gputile.engine.placement.place import Candidate, candidates, rules_of, unit_miss
from gputile.engine.placement.units import split
from gputile.engine.search_budget import NOT_SEARCHED_FURTHER, SearchBudget
from gputile.engine.victims import RequestAfterEviction, Victim, victims
from gputile.model.cards import FreeCapacity, NodeView
from gputile.model.refusals import SENTENCE, NodeReason, Refusal, about_one_node
from gputile.model.requests import Constraints, ContainerRequest, ModelRule, PodRequest
from gputile.model.units import show_memory

ABOVE_ALL = 2**31  # a priority above that of every pod
VICTIM_NODES = 8  # nodes on which pods in the way are looked for
STEPS = 40_000  # of the search budget, where the caller passes none
WHY_STEPS, WHY_SECONDS = 4000, 0.02  # part of the budget for the reasons of all nodes
CHANGE_STEPS, CHANGE_SECONDS = 300, 0.01  # part of the budget for each change that is tried
NODE_STEPS, NODE_SECONDS = 2000, 0.02  # part of the budget for the pods in the way on one node
MOST_NAMES, LONGEST_NAME = 3, 40  # of requested models: a tenant writes them
WITHOUT_NUMBERS = (
    NodeReason.TOGETHER,
    NodeReason.SEARCH,
    NodeReason.NO_CARDS,
    NodeReason.QUOTA_POOL,
    NodeReason.QUOTA_MODEL,
    NodeReason.QUOTA,  # the numbers belong to the namespace, not to a node
)
ANY = "binpack"  # whether a pod fits does not depend on the policy; this policy does not learn from requests


Allow = Callable[[PodRequest], PodRequest]
"""Adds to a request what the quota of its namespace allows."""


class ReasonSummary(msgspec.Struct, frozen=True):
    """A reason, and the number of nodes that it rejects the pod from."""

    code: NodeReason
    nodes: int
    resolvable: int  # how many of these nodes eviction would make fit

    @property
    def sentence(self) -> str:
        return SENTENCE[self.code]


class NearMiss(msgspec.Struct, frozen=True):
    """Why one node does not fit, with numbers."""

    node: str
    code: NodeReason
    text: str
    resolvable: bool


class SuggestedChange(msgspec.Struct, frozen=True):
    """A change to the pod or the cluster after which the pod fits on the named node."""

    what: str  # "memory", "cores", "cards", "model", "share", "pods"
    text: str
    node: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why a pod is pending, or that it fits."""

    nodes: int
    fitting: int
    reasons: tuple[ReasonSummary, ...]
    misses: tuple[NearMiss, ...]  # nearest first
    changes: tuple[SuggestedChange, ...]
    cut_short: bool = False  # the search budget ran out: there may be more changes

    @property
    def summary(self) -> str:
        """One line in the grammar of kube-scheduler's `FailedScheduling` events."""
        head = f"{self.fitting}/{self.nodes} nodes are available"
        reasons = ", ".join(f"{reason.nodes} {reason.sentence}" for reason in self.reasons)
        return f"{head}: {reasons}." if reasons else f"{head}."

    @property
    def is_about_quota(self) -> bool:
        """Whether the quota of the pod's namespace rejects it from some node."""
        return any(reason.code in (NodeReason.QUOTA, NodeReason.QUOTA_MODEL) for reason in self.reasons)

    def lines(self, misses: int = 3) -> list[str]:
        """For a terminal: the summary, the nearest misses, and what would help."""
        lines = [self.summary]
        lines += [f"  nearest: {miss.node}: {miss.text}" for miss in self.misses[:misses]]
        lines += [f"  would fit: {change.text}" for change in self.changes]
        if not self.nodes:
            lines.append("  no node is known yet; add a node with GPUs, or check that its agent is running")
        elif self.cut_short:
            lines.append(f"  {NOT_SEARCHED_FURTHER}: there are too many ways to place its containers")
        elif not self.fitting and not self.changes and not self.is_about_quota:
            lines.append("  no smaller request would fit either; add a node with such GPUs")
        return lines


def explain(
    request: PodRequest,
    fleet: Fleet,
    holders: Mapping[str, Iterable[Victim]] | None = None,
    look_at: int | None = None,
    after: RequestAfterEviction | None = None,
    allow: Allow | None = None,
    budget: SearchBudget | None = None,
) -> Explanation:
    """Explain why the pod does not fit.

    With `holders` (by node) it names the pods in the way, with `after` also pods that hold the namespace's quota.
    `allow` adds to a changed request what quota allows. Reasons are counted over all nodes; misses are worked out for
    all nodes, or for the `look_at` most likely ones.
    """
    return run_to_end(explain_cooperatively(request, fleet, holders, look_at, after, allow, budget))


def explain_cooperatively(
    request: PodRequest,
    fleet: Fleet,
    holders: Mapping[str, Iterable[Victim]] | None = None,
    look_at: int | None = None,
    after: RequestAfterEviction | None = None,
    allow: Allow | None = None,
    budget: SearchBudget | None = None,
) -> Cooperative[Explanation]:
    budget = budget or SearchBudget(STEPS)
    nodes, refusals = len(fleet), fleet.refusals(request, budget=budget.part(WHY_STEPS, WHY_SECONDS))
    likely = sorted(refusals, key=lambda r: (not r.resolvable, r.requested - r.found)) if look_at else refusals
    near: list[tuple[tuple[object, ...], NearMiss]] = []
    for refusal in likely[:look_at]:
        yield
        if refusal.node in fleet:
            near.append(_miss(request, fleet.view(refusal.node), refusal))
    misses = [miss for _, miss in sorted(near, key=lambda keyed: keyed[0])]
    fitting = nodes - len(refusals)
    search = _ChangeSearch(request, fleet, allow, budget)
    changes = [] if fitting else (yield from search.changes(misses, holders or {}, after))
    return Explanation(
        nodes=nodes,
        fitting=fitting,
        reasons=_reasons(refusals),
        misses=tuple(misses),
        changes=tuple(changes),
        cut_short=not fitting and budget.ran_out,
    )


def _reasons(refusals: list[Refusal]) -> tuple[ReasonSummary, ...]:
    total = Counter(refusal.code for refusal in refusals)
    resolvable = Counter(refusal.code for refusal in refusals if refusal.resolvable)
    return tuple(ReasonSummary(code, nodes, resolvable[code]) for code, nodes in total.most_common())


# ---- the nearest miss -----------------------------------------------------------------------------------------------


def _miss(request: PodRequest, view: NodeView, refusal: Refusal) -> tuple[tuple[object, ...], NearMiss]:
    """The miss, and a key that sorts the nearest first."""
    shortage, text = _shortage(request, view, refusal)
    key = (not refusal.resolvable, shortage, refusal.node)
    return key, NearMiss(refusal.node, refusal.code, text, refusal.resolvable)


def _shortage(request: PodRequest, view: NodeView, refusal: Refusal) -> tuple[float, str]:
    """How much is missing (as a part of the request), and the text."""
    code, requested, found = refusal.code, refusal.requested, refusal.found
    if code in (NodeReason.MEMORY, NodeReason.CORES, NodeReason.TOO_SMALL):
        return _card_shortage(request, view, refusal)
    if code is NodeReason.MODEL:
        models = ", ".join(sorted({card.model or "unknown" for card in view.node.cards}))
        return 1.0, f"{_gpus(requested)} of {_models(request.constraints)} requested, has {models}"
    if code is NodeReason.CPU:
        return (requested - found) / requested, f"{requested / 1000:g} CPU requested, {max(found, 0) / 1000:g} free"
    if code is NodeReason.HOST_MEMORY:
        free = show_memory(max(found, 0))
        return (requested - found) / requested, f"{show_memory(requested)} of host memory requested, {free} free"
    if code in WITHOUT_NUMBERS or code == view.node.fault:
        return 1.0, about_one_node(code)
    return (requested - found) / max(requested, 1), f"{about_one_node(code)}: {requested} requested, {found} found"


def _card_shortage(request: PodRequest, view: NodeView, refusal: Refusal) -> tuple[float, str]:
    """Memory or cores: what the container requests against what the deciding card has."""
    candidate = _deciding(request, view, refusal)
    if candidate is None:
        return 1.0, about_one_node(refusal.code)
    small = refusal.code is NodeReason.TOO_SMALL
    need, free = candidate.need, FreeCapacity.of(candidate.card) if small else candidate.free
    best = _best_gpu(refusal.requested, "largest" if small else "freest")
    gpus = _on_gpus(refusal.requested)
    if refusal.code is NodeReason.MEMORY or (small and not need.fits_memory(free)):
        short = (need.memory - free.memory) / max(need.memory, 1)
        has = f"{best} has {show_memory(free.memory)}" if free.memory > 0 else "none has free memory"
        return short, f"{show_memory(need.memory)} requested on {gpus}, {has}"
    if refusal.code is NodeReason.CORES or not need.fits_cores(free):
        cores = max(1, need.cores)
        has = f"{best} has {free.cores} %" if free.cores > 0 else "none has free cores"
        return (cores - free.cores) / cores, f"{cores} % of the cores requested on {gpus}, {has}"
    return 1.0, f"{need.slots} slots requested on {gpus}, {best} has {free.slots}"


def _deciding(request: PodRequest, view: NodeView, refusal: Refusal) -> Candidate | None:
    """The deciding card: of the cards that pass the rules before the failed one, the n-th best for a request of n
    cards. None where the node has changed since the refusal."""
    constraints = request.constraints
    missed = (unit for unit in split(request) if (unit_miss(unit, constraints, view) or (None,))[0] is refusal.code)
    unit = next(missed, None)
    left = candidates(unit, constraints, view) if unit is not None else []
    for rule in rules_of(constraints):
        if rule.code is refusal.code:
            break
        left = [candidate for candidate in left if rule.passes(candidate)]
    by_cores = refusal.code is NodeReason.CORES
    if refusal.code is NodeReason.TOO_SMALL:
        left.sort(key=lambda candidate: candidate.card.memory, reverse=True)
    else:
        left.sort(key=lambda c: c.free.cores if by_cores else c.free.memory, reverse=True)
    return left[refusal.requested - 1] if len(left) >= refusal.requested else None


def _gpus(requested: int) -> str:
    return "one GPU" if requested == 1 else f"{requested} GPUs"


def _on_gpus(requested: int) -> str:
    return "one GPU" if requested == 1 else f"each of {requested} GPUs"


def _best_gpu(requested: int, quality: str) -> str:
    return f"the {quality}" if requested == 1 else f"one of the {requested} {quality}"


def _models(constraints: Constraints) -> str:
    """The requested models, such as `model A100` or `a model other than T4`."""
    requested = " and ".join(map(_names, constraints.models[:MOST_NAMES]))
    excluded = " or ".join(map(_names, constraints.not_models[:MOST_NAMES]))
    if not excluded:
        return f"model {requested}"
    return f"model {requested} (not {excluded})" if requested else f"a model other than {excluded}"


def _names(rule: ModelRule) -> str:
    """A tenant writes these names: few of them, cut short, without control characters."""
    names = [name[:LONGEST_NAME] for name in rule.names[:MOST_NAMES]]
    more = ["..."] if len(rule.names) > MOST_NAMES else []
    return "".join(letter if letter.isprintable() else "?" for letter in " or ".join(names + more))


# ---- the smallest change --------------------------------------------------------------------------------------------


class _ChangeSearch:
    """Searches for changes after which a pod would fit, one kind of change after the other."""

    def __init__(self, request: PodRequest, fleet: Fleet, allow: Allow | None, budget: SearchBudget) -> None:
        self._request, self._fleet, self._allow, self._budget = request, fleet, allow, budget

    def changes(
        self, misses: list[NearMiss], holders: Mapping[str, Iterable[Victim]], after: RequestAfterEviction | None
    ) -> Cooperative[list[SuggestedChange]]:
        changes = []
        for attempt in (self._less_memory, self._fewer_cores, self._fewer_cards, self._another_model):
            change = yield from attempt()
            changes += [change] if change is not None else []
        in_the_way = yield from self._pods_in_the_way(misses, holders, after)
        return [*changes, in_the_way] if in_the_way else changes

    # ---- queries of the fleet ---------------------------------------------------------------------------------------

    def _fits(self, request: PodRequest) -> bool:
        if self._budget.is_spent:
            self._budget.cut_short()
            return False
        return bool(self._fleet.fits(request, self._budget.part(CHANGE_STEPS, CHANGE_SECONDS)).any())

    def _node_for(self, request: PodRequest) -> str | None:
        allowed = request if self._allow is None else self._allow(request)
        names = self._fleet.best(allowed, ANY, budget=self._budget.part(CHANGE_STEPS, CHANGE_SECONDS))
        return names[0] if names else None

    def _most(self, least: int, below: int, shrunk: Callable[[int], PodRequest]) -> Cooperative[int | None]:
        """The largest number that fits, from `least` to `below` (exclusive), by bisection: a smaller number always
        fits."""
        if below <= least or not self._fits(shrunk(least)):
            return None
        low, high = least, below
        while high - low > 1:
            yield
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(shrunk(middle)) else (low, middle)
        return low

    def _with(self, change: Callable[[ContainerRequest], ContainerRequest]) -> PodRequest:
        asks = tuple(change(ask) if ask.cards else ask for ask in self._request.asks)
        return msgspec.structs.replace(self._request, asks=asks)

    # ---- what could change ------------------------------------------------------------------------------------------

    def _less_memory(self) -> Cooperative[SuggestedChange | None]:
        """Less memory in the container that requests most, the others unchanged. A whole card becomes a tile."""
        request, fleet = self._request, self._fleet
        average = fleet.average_card()
        largest = max((ask for ask in request.asks if ask.cards), key=lambda ask: ask.memory_of(average))
        block = request.block

        def shrunk(blocks: int) -> PodRequest:
            def change(ask: ContainerRequest) -> ContainerRequest:
                if ask is not largest:
                    return ask
                cores = 0 if ask.exclusive else ask.cores
                return msgspec.structs.replace(
                    ask, memory=blocks * block, memory_percent=None, exclusive=False, cores=cores
                )

            return self._with(change)

        below = fleet.largest_card() if largest.memory is None or largest.exclusive else largest.memory
        best = yield from self._most(1, below // block, shrunk)
        node = best and self._node_for(shrunk(best))
        if not best or not node:
            return None
        container = f" in container {largest.container}" if sum(bool(ask.cards) for ask in request.asks) > 1 else ""
        kind, tile = ("share", "a tile of ") if largest.exclusive else ("memory", "")
        size = f"{tile}at most {show_memory(best * block)} per GPU"
        return SuggestedChange(kind, f"{size}{container} instead of {_memory_of(largest)}, on {node}", node)

    def _fewer_cores(self) -> Cooperative[SuggestedChange | None]:
        most = max(ask.cores for ask in self._request.asks)
        if not most or any(ask.exclusive for ask in self._request.asks):
            return None

        def shrunk(cores: int) -> PodRequest:
            return self._with(lambda ask: msgspec.structs.replace(ask, cores=min(ask.cores, cores)))

        best = yield from self._most(0, most, shrunk)
        node = None if best is None else self._node_for(shrunk(best))
        return (
            SuggestedChange("cores", f"at most {best} % of the cores instead of {most} %, on {node}", node)
            if node
            else None
        )

    def _fewer_cards(self) -> Cooperative[SuggestedChange | None]:
        most = max(ask.cards for ask in self._request.asks)

        def shrunk(cards: int) -> PodRequest:
            return self._with(lambda ask: msgspec.structs.replace(ask, cards=min(ask.cards, cards)))

        best = yield from self._most(1, most, shrunk)
        node = None if best is None else self._node_for(shrunk(best))
        gpus = "1 GPU" if best == 1 else f"{best} GPUs"
        return SuggestedChange("cards", f"{gpus} per container instead of {most}, on {node}", node) if node else None

    def _another_model(self) -> Cooperative[SuggestedChange | None]:
        rule = self._request.constraints
        if not rule.models and not rule.not_models:
            return None
        for model in sorted(self._fleet.card_models()):
            yield
            only = msgspec.structs.replace(rule, models=(ModelRule((model,)),), not_models=())
            node = self._node_for(msgspec.structs.replace(self._request, constraints=only))
            if node is not None:
                return SuggestedChange("model", f"model {model}, on {node}", node)
        return None

    def _pods_in_the_way(
        self, misses: list[NearMiss], holders: Mapping[str, Iterable[Victim]], after: RequestAfterEviction | None
    ) -> Cooperative[SuggestedChange | None]:
        """The fewest pods whose end would make the pod fit, on the nearest nodes."""
        sets: list[tuple[int, str, tuple[Victim, ...]]] = []
        resolvable = [miss for miss in misses if miss.resolvable and miss.node in holders]
        for miss in resolvable[:VICTIM_NODES]:
            yield
            if miss.node not in self._fleet:
                continue
            view, part = self._fleet.view(miss.node), self._budget.part(NODE_STEPS, NODE_SECONDS)
            evicted = victims(self._request, view, holders[miss.node], ABOVE_ALL, after=after, budget=part)
            if evicted:
                sets.append((len(evicted), miss.node, evicted))
        if not sets:
            return None
        _, node, evicted = min(sets, key=lambda entry: entry[:2])
        names, end = ", ".join(victim.name or victim.pod for victim in evicted), "ends" if len(evicted) == 1 else "end"
        return SuggestedChange("pods", f"as it is, once {names} {end} on {node}", node)


def _memory_of(container: ContainerRequest) -> str:
    if container.exclusive:
        return "the whole GPU"
    return show_memory(container.memory) if container.memory else f"{container.memory_percent} %"
