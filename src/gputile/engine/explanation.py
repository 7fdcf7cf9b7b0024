"""Why a pod waits, in words a person can act on; made once, here, for events, terminal, API and page.

`explain` counts the reasons over all nodes, gives each node's nearest miss with figures, and looks for the smallest
change that would fit. A change is only named after the changed request was seen to fit. All of it has one budget; where
that runs out, the explanation says so. `explain_cooperatively` is the same for those who have other things to do in
between.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import msgspec

from gputile.engine.cooperative import Cooperative, run_to_end
from gputile.engine.fleet.fleet import Fleet
from gputile.engine.placement.place import Candidate, cases, rules_of, unit_miss
from gputile.engine.placement.units import split
from gputile.engine.search_budget import NOT_SEARCHED_FURTHER, SearchBudget
from gputile.engine.victims import RequestAfterEviction, Victim, victims
from gputile.model.cards import FreeCapacity, NodeView
from gputile.model.refusals import SENTENCE, NodeReason, Refusal
from gputile.model.requests import ContainerRequest, ModelRule, PodRequest
from gputile.model.units import show_memory

ABOVE_ALL = 2**31
LOOK_FOR_PODS_ON = 8  # nodes
STEPS = 40_000  # of a search, for all of it, where whoever asks says nothing else
WHY_STEPS, WHY_SECONDS = 4000, 0.02  # of it for why each node does not fit
CHANGE_STEPS, CHANGE_SECONDS = 300, 0.01  # of it for each change that is tried
NODE_STEPS, NODE_SECONDS = 2000, 0.02  # of it for the pods in the way on one node
WITHOUT_FIGURES = (
    NodeReason.TOGETHER,
    NodeReason.SEARCH,
    NodeReason.NO_CARDS,
    NodeReason.QUOTA_POOL,
    NodeReason.QUOTA_MODEL,
    NodeReason.QUOTA,  # of which the namespace has the figures, and no node
)
ANY = "binpack"  # whether something fits does not depend on the policy; this one learns nothing from questions


Allow = Callable[[PodRequest], PodRequest]
"""The request, and nothing that quota does not leave to it."""


class ReasonSummary(msgspec.Struct, frozen=True):
    """A reason, and on how many nodes it is the first."""

    code: NodeReason
    nodes: int
    resolvable: int  # of them, where eviction would help

    @property
    def sentence(self) -> str:
        return SENTENCE[self.code]


class NearMiss(msgspec.Struct, frozen=True):
    """How a node just fails, with figures."""

    node: str
    code: NodeReason
    text: str
    resolvable: bool


class SuggestedChange(msgspec.Struct, frozen=True):
    """One change to the pod or the cluster after which the pod would fit on the named node."""

    what: str  # "memory", "cores", "cards", "model", "share", "pods"
    text: str
    node: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why a pod waits, or that it does not have to."""

    nodes: int
    fitting: int
    reasons: tuple[ReasonSummary, ...]
    misses: tuple[NearMiss, ...]  # nearest first
    changes: tuple[SuggestedChange, ...]
    cut_short: bool = False  # there may be more to say, and to find out would have cost too much

    @property
    def summary(self) -> str:
        """One line, as kube-scheduler would put it."""
        head = f"{self.fitting}/{self.nodes} nodes fit"
        told = ", ".join(f"{reason.nodes} {reason.sentence}" for reason in self.reasons)
        return f"{head}: {told}." if told else f"{head}."

    @property
    def is_about_quota(self) -> bool:
        """Whether the pod's namespace may not have what some node has."""
        return any(reason.code in (NodeReason.QUOTA, NodeReason.QUOTA_MODEL) for reason in self.reasons)

    def lines(self, misses: int = 3) -> list[str]:
        """The whole story for a terminal: summary, the nearest misses, what would help."""
        told = [self.summary]
        told += [f"  nearest: {miss.node}: {miss.text}" for miss in self.misses[:misses]]
        told += [f"  would fit: {change.text}" for change in self.changes]
        if not self.nodes:
            told.append("  no node is known yet; add one with GPUs, or see that its agent runs")
        elif self.cut_short:
            told.append(f"  {NOT_SEARCHED_FURTHER}: there are too many ways to place its containers")
        elif not self.fitting and not self.changes and not self.is_about_quota:
            told.append("  nothing smaller would fit either; add a node that has such cards")
        return told


def explain(
    request: PodRequest,
    fleet: Fleet,
    holders: Mapping[str, Iterable[Victim]] | None = None,
    look_at: int | None = None,
    after: RequestAfterEviction | None = None,
    allow: Allow | None = None,
    budget: SearchBudget | None = None,
) -> Explanation:
    """`holders` by node lets it name the pods that are in the way, `after` those who hold the quota. `allow` says what
    quota leaves to a changed request.

    Reasons are counted over all nodes. Misses are looked at closely on all, or on the `look_at` that promise most.
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
    likely = sorted(refusals, key=lambda no: (not no.resolvable, no.wanted - no.found)) if look_at else refusals
    near: list[tuple[tuple[object, ...], NearMiss]] = []
    for refusal in likely[:look_at]:
        yield
        if refusal.node in fleet:
            near.append(_miss(request, fleet.view(refusal.node), refusal))
    misses = [miss for _, miss in sorted(near, key=lambda found: found[0])]
    fitting = nodes - len(refusals)
    search = _Changes(request, fleet, allow, budget)
    changes = [] if fitting else (yield from search.found(misses, holders or {}, after))
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
    shortage, text = _figures(request, view, refusal)
    key = (not refusal.resolvable, shortage, refusal.node)
    return key, NearMiss(refusal.node, refusal.code, text, refusal.resolvable)


def _figures(request: PodRequest, view: NodeView, refusal: Refusal) -> tuple[float, str]:
    """How much is missing (as a part of what is wanted), and the sentence."""
    code, wanted, found = refusal.code, refusal.wanted, refusal.found
    if code in (NodeReason.MEMORY, NodeReason.CORES, NodeReason.TOO_SMALL):
        return _card_figures(request, view, refusal)
    if code is NodeReason.MODEL:
        models = ", ".join(sorted({card.model or "unknown" for card in view.node.cards}))
        return 1.0, f"wants {_of_cards(wanted)} of another model, has {models}"
    if code is NodeReason.CPU:
        return (wanted - found) / wanted, f"wants {wanted / 1000:g} CPU, {max(found, 0) / 1000:g} free"
    if code is NodeReason.HOST_MEMORY:
        return (wanted - found) / wanted, f"wants {show_memory(wanted)} main memory, {max(found, 0)} MiB free"
    if code in WITHOUT_FIGURES or code == view.node.fault:
        return 1.0, SENTENCE[code]
    return (wanted - found) / max(wanted, 1), f"{SENTENCE[code]}: wants {wanted}, found {found}"


def _card_figures(request: PodRequest, view: NodeView, refusal: Refusal) -> tuple[float, str]:
    """Memory or cores: what the container wants against what the deciding card has."""
    case = _deciding(request, view, refusal)
    if case is None:
        return 1.0, SENTENCE[refusal.code]
    small = refusal.code is NodeReason.TOO_SMALL
    room = FreeCapacity.of(case.card) if small else case.room
    most = "the largest" if small else "the freest"
    cards = _of_cards(refusal.wanted)
    if refusal.code is NodeReason.MEMORY or (small and not case.need.fits_memory(room)):
        short = (case.need.memory - room.memory) / max(case.need.memory, 1)
        has = f"{most} has {show_memory(room.memory)}" if room.memory > 0 else "none is free"
        return short, f"wants {show_memory(case.need.memory)} on {cards}, {has}"
    if refusal.code is NodeReason.CORES or not case.need.fits_cores(room):
        want = max(1, case.need.cores)
        has = f"{most} has {room.cores} %" if room.cores > 0 else "none is free"
        return (want - room.cores) / want, f"wants {want} % of the cores on {cards}, {has}"
    return 1.0, f"wants {case.need.slots} slots on {cards}, {most} has {room.slots}"


def _deciding(request: PodRequest, view: NodeView, refusal: Refusal) -> Candidate | None:
    """The card that decides: of those left before the failed rule the n-th best, if n are wanted. None where the node
    has changed since it was refused."""
    rule = request.constraints
    missed = (unit for unit in split(request) if (unit_miss(unit, rule, view) or (None,))[0] is refusal.code)
    unit = next(missed, None)
    left = cases(unit, rule, view) if unit is not None else []
    for stage in rules_of(rule):
        if stage.code is refusal.code:
            break
        left = [case for case in left if stage.passes(case)]
    by_cores = refusal.code is NodeReason.CORES
    if refusal.code is NodeReason.TOO_SMALL:
        left.sort(key=lambda case: case.card.memory, reverse=True)
    else:
        left.sort(key=lambda case: case.room.cores if by_cores else case.room.memory, reverse=True)
    return left[refusal.wanted - 1] if len(left) >= refusal.wanted else None


def _of_cards(wanted: int) -> str:
    return "one GPU" if wanted == 1 else f"each of {wanted} GPUs"


# ---- the smallest change --------------------------------------------------------------------------------------------


class _Changes:
    """The changes after which a pod would fit, looked for one after the other."""

    def __init__(self, request: PodRequest, fleet: Fleet, allow: Allow | None, budget: SearchBudget) -> None:
        self._request, self._fleet, self._allow, self._budget = request, fleet, allow, budget

    def found(
        self, misses: list[NearMiss], holders: Mapping[str, Iterable[Victim]], after: RequestAfterEviction | None
    ) -> Cooperative[list[SuggestedChange]]:
        changes = []
        for attempt in (self._less_memory, self._fewer_cores, self._fewer_cards, self._another_model):
            change = yield from attempt()
            changes += [change] if change is not None else []
        in_the_way = yield from self._pods_in_the_way(misses, holders, after)
        return [*changes, in_the_way] if in_the_way else changes

    # ---- asking the fleet -------------------------------------------------------------------------------------------

    def _fits(self, request: PodRequest) -> bool:
        if self._budget.is_spent:
            self._budget.cut_short()
            return False
        return bool(self._fleet.fits(request, self._budget.part(CHANGE_STEPS, CHANGE_SECONDS)).any())

    def _node_for(self, request: PodRequest) -> str | None:
        may = request if self._allow is None else self._allow(request)
        found = self._fleet.best(may, ANY, budget=self._budget.part(CHANGE_STEPS, CHANGE_SECONDS))
        return found[0] if found else None

    def _most(self, least: int, below: int, shrunk: Callable[[int], PodRequest]) -> Cooperative[int | None]:
        """The largest number from `least` up to, but not, `below` that fits; larger ones fit less."""
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
        """Less memory in the container that wants most, the others unchanged. A whole card becomes a tile."""
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
        instead = "the whole" if largest.exclusive else str(largest.memory or f"{largest.memory_percent} %")
        what = "share" if largest.exclusive else "memory"
        tile = "a tile of " if largest.exclusive else ""
        text = f"{tile}at most {best * block} MiB per card{container} instead of {instead}, on {node}"
        return SuggestedChange(what, text, node)

    def _fewer_cores(self) -> Cooperative[SuggestedChange | None]:
        most = max(ask.cores for ask in self._request.asks)
        if not most or any(ask.exclusive for ask in self._request.asks):
            return None

        def shrunk(cores: int) -> PodRequest:
            return self._with(lambda ask: msgspec.structs.replace(ask, cores=min(ask.cores, cores)))

        best = yield from self._most(0, most, shrunk)
        node = None if best is None else self._node_for(shrunk(best))
        return (
            SuggestedChange("cores", f"at most {best} % of the cores instead of {most}, on {node}", node)
            if node
            else None
        )

    def _fewer_cards(self) -> Cooperative[SuggestedChange | None]:
        most = max(ask.cards for ask in self._request.asks)

        def shrunk(cards: int) -> PodRequest:
            return self._with(lambda ask: msgspec.structs.replace(ask, cards=min(ask.cards, cards)))

        best = yield from self._most(1, most, shrunk)
        node = None if best is None else self._node_for(shrunk(best))
        cards = "1 card" if best == 1 else f"{best} cards"
        return SuggestedChange("cards", f"{cards} per container instead of {most}, on {node}", node) if node else None

    def _another_model(self) -> Cooperative[SuggestedChange | None]:
        rule = self._request.constraints
        if not rule.models and not rule.not_models:
            return None
        for model in sorted(self._fleet.card_models()):
            yield
            only = msgspec.structs.replace(rule, models=(ModelRule((model,)),), not_models=())
            node = self._node_for(msgspec.structs.replace(self._request, constraints=only))
            if node is not None:
                return SuggestedChange("model", f"the model {model}, on {node}", node)
        return None

    def _pods_in_the_way(
        self, misses: list[NearMiss], holders: Mapping[str, Iterable[Victim]], after: RequestAfterEviction | None
    ) -> Cooperative[SuggestedChange | None]:
        """The fewest pods whose end would make room, on the nearest nodes."""
        found: list[tuple[int, str, tuple[Victim, ...]]] = []
        resolvable = [miss for miss in misses if miss.resolvable and miss.node in holders]
        for miss in resolvable[:LOOK_FOR_PODS_ON]:
            yield
            if miss.node not in self._fleet:
                continue
            view, part = self._fleet.view(miss.node), self._budget.part(NODE_STEPS, NODE_SECONDS)
            gone = victims(self._request, view, holders[miss.node], ABOVE_ALL, after=after, budget=part)
            if gone:
                found.append((len(gone), miss.node, gone))
        if not found:
            return None
        _, node, gone = min(found, key=lambda one: one[:2])
        names = ", ".join(holder.name or holder.pod for holder in gone)
        return SuggestedChange("pods", f"as it is, once {names} {'ends' if len(gone) == 1 else 'end'} on {node}", node)
