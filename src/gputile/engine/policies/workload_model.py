"""The workload model: the tables that `fragmentation` and `tiling` score with, learnt from the pods so far.

It counts arrivals online: it knows the pods so far and the fleet, never the future. `WorkloadModel.observe` counts a
pod, `WorkloadModel.due` says when the tables are stale, `WorkloadModel.prepare` makes new tables for `scoring` to swap
in. After a restart, observing the pods of the cluster rebuilds the model.

Making tables takes up to a tenth of a second. `TrainingData` has copies of its input, so that a thread can make the
tables and the thread of the fleet can adopt them.

Tenants choose how many kinds of pods there are, so everything is bounded: the most frequent kinds and the heaviest
fractions are kept apart, and every other kind counts as the nearest of these.

A pod is a *task*: its CPU, the number of cards, the share of each card in whole percent, and the models it accepts.
Memory in MiB becomes a share of the fleet's average card, cores are a share already, and the larger of the two counts.
Of several containers the task is the largest unit with the CPU of the whole pod. A pod that ends stays counted, because
it was part of the workload; the fleet releases it at once.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from gputile.engine.placement.shares import CARD, ask_share
from gputile.engine.placement.units import PlacementUnit, split
from gputile.engine.policies.cutting_stock import prices, values
from gputile.model.requests import Constraints, ModelRule, PodRequest
from gputile.model.units import MiB, Millicores

PERCENT = CARD // 100
COVERED = 0.95  # of the pods; rarer tasks are left out, as in the literature
FIRST_REFRESH = 100  # arrivals; then at 200, 400, 800, ... An early first refresh matters, the frequency does not
PRICE_EVERY = 100  # arrivals
MOST_TASKS = 5000  # kinds of pods that are counted at most
MOST_POPULAR = 128  # kinds that scores distinguish; real lists have 35 to 115
MOST_FOLDED = 512  # rarer kinds that count as one of these; the rest is left out
MOST_MODEL_SETS = 128  # sets of models that pods require, and that raise prices; real lists have 25
MOST_FRACTIONS = 32  # fractions of a card with a price of their own; real lists have 20
PRIOR_PODS = 50.0
PRIOR = ((1, 25, 1.0), (1, 50, 1.0), (1, 100, 2.0), (2, 100, 0.5), (4, 100, 0.25), (8, 100, 0.25))
"""The workload before any pod arrives: cards, share of each, weight. Without it a point of allocation is lost."""
PRIOR_CPU = 0.7  # of the cluster's CPU per card


ModelSet = tuple[tuple[ModelRule, ...], tuple[ModelRule, ...]]
"""The models that a kind of pod requires, and those that it excludes."""

FAR_MODELS, FAR = (
    1e9,
    np.array([1e6, 1e3, 1.0]),
)  # distance between models; weights of cards, percent of a card, CPU cores


class PodKind(msgspec.Struct, frozen=True):
    """A kind of pod: a task in the words of the literature."""

    cpu: Millicores
    cards: int
    share: int  # percent of each card; 0 for a pod without GPU
    models: tuple[ModelRule, ...] = ()
    not_models: tuple[ModelRule, ...] = ()

    @property
    def size(self) -> float:
        """In cards."""
        return self.cards * self.share / 100

    @property
    def model_set(self) -> "ModelSet":
        return self.models, self.not_models

    def accepts(self, model: str) -> bool:
        return Constraints(models=self.models, not_models=self.not_models).accepts_model(model)


def task_of(request: PodRequest, average_card: MiB) -> PodKind:
    units = split(request)
    if not units:
        return PodKind(request.cpu, 0, 0)
    sizes = [(unit.cards, _percent_of_a_card(unit, average_card)) for unit in units]
    cards, share = max(sizes, key=lambda size: size[0] * size[1])
    rule = request.constraints
    return PodKind(request.cpu, cards, max(1, min(share, 100)), rule.models, rule.not_models)


def _percent_of_a_card(unit: PlacementUnit, average_card: MiB) -> int:
    """Rounded up, unless fewer of them would then fit on a card: an eighth is 12 %, not 13."""
    tiles = sum(ask_share(ask, average_card) for ask in unit.asks_in(unit.phases()[0]))
    up, down = -int(-tiles // PERCENT), int(tiles // PERCENT)
    return down if down and 100 // up < CARD // tiles else up


class Supply(msgspec.Struct, frozen=True, kw_only=True):
    """The free cards and CPU of the cluster, as the model needs them."""

    models: tuple[str, ...]  # in the order of the fleet's model numbers
    free: tuple[float, ...]  # free cards by model
    free_cpu: float  # millicores
    cpu_per_card: float  # millicores, of the whole cluster


class WorkloadTables(msgspec.Struct, frozen=True, kw_only=True):
    """The learnt tables, as arrays over the popular tasks. Never changed, only replaced."""

    weight: NDArray[np.float64]  # sums to 1
    cpu: NDArray[np.int64]
    cards: NDArray[np.int32]
    share: NDArray[np.int32]  # in shares.CARD
    accepts: NDArray[np.bool_] | None  # task x model; None when every task accepts all models
    value: NDArray[np.float64]  # V(r) for 0..100 percent of a card
    rho: float  # millicores per card that GPU pods request


class TrainingData(msgspec.Struct, frozen=True):
    """The input of learning: copies that are never changed."""

    counts: dict[PodKind, float]
    supply: Supply
    requests: tuple[PodRequest, ...] | None = None  # to be counted first: the model starts over
    average: MiB = 0

    def study(self) -> "LearntModel":
        """Make the tables. Pure and slow: not for the event loop."""
        if self.requests is None:
            return LearntModel(tables(with_prior(self.counts, self.supply, PRIOR_PODS), self.supply))
        learner = WorkloadModel()
        kinds = {request: task_of(request, self.average) for request in set(self.requests)}  # few kinds, many pods
        for request in self.requests:
            learner.observe(kinds[request])
        return LearntModel(learner.prepare(self.supply), learner)


class LearntModel(msgspec.Struct, frozen=True):
    """The result of learning: new tables, and a new model if the old counts were dropped."""

    tables: WorkloadTables
    learner: "WorkloadModel | None" = None  # replaces the old model


class WorkloadModel:
    """Counts the pods that arrived, by kind, and makes tables of the counts."""

    def __init__(self, *, prior: float = PRIOR_PODS) -> None:
        self._counts: dict[PodKind, float] = {}
        self._prior = prior
        self._next = FIRST_REFRESH
        self.arrivals = 0

    def observe(self, task: PodKind) -> None:
        self._counts[task] = self._counts.get(task, 0.0) + 1.0
        self.arrivals += 1
        if len(self._counts) > MOST_TASKS:  # too many different pods: keep the frequent kinds
            self._counts = dict(sorted(self._counts.items(), key=lambda entry: -entry[1])[: MOST_TASKS // 2])

    def due(self) -> bool:
        return self.arrivals >= self._next

    def prepare(self, supply: Supply, value: NDArray[np.float64] | None = None) -> WorkloadTables:
        """New tables from all counts; `value`: the worth of remainders, where it is known and need not be computed."""
        self.begin()
        return tables(with_prior(self._counts, supply, self._prior), supply, value)

    def begin(self) -> None:
        """Learning has started: set the next time it is due."""
        while self._next <= self.arrivals:
            self._next *= 2

    def asked(self) -> dict[PodKind, float]:
        return self._counts


def with_prior(counts: dict[PodKind, float], supply: Supply, pods: float) -> dict[PodKind, float]:
    counts = dict(counts)
    for cards, share, weight in PRIOR:
        cpu = round(PRIOR_CPU * supply.cpu_per_card * cards * share / 100)
        task = PodKind(cpu, cards, share)
        counts[task] = counts.get(task, 0.0) + pods * weight / sum(w for _, _, w in PRIOR)
    return counts


def tables(counts: dict[PodKind, float], supply: Supply, value: NDArray[np.float64] | None = None) -> WorkloadTables:
    popular = _popular(counts)
    weight = np.array([count for _, count in popular])
    tasks = [task for task, _ in popular]
    selective = any(task.models or task.not_models for task in tasks)
    models = supply.models or ("",)  # a fleet without cards still has model number 0
    accepts = (
        np.array([[task.accepts(model) for model in models] for task in tasks], dtype=np.bool_) if selective else None
    )
    return WorkloadTables(
        weight=weight / weight.sum(),
        cpu=np.array([task.cpu for task in tasks], dtype=np.int64),
        cards=np.array([task.cards for task in tasks], dtype=np.int32),
        share=np.array([task.share * PERCENT for task in tasks], dtype=np.int32),
        accepts=accepts,
        value=value if value is not None else values(prices(heaviest(_fractions(counts)))),
        rho=_cpu_per_card(counts),
    )


def _popular(counts: dict[PodKind, float]) -> list[tuple[PodKind, float]]:
    """The most frequent tasks, until they cover enough of the pods."""
    ranked = sorted(counts.items(), key=lambda entry: -entry[1])
    enough, covered = COVERED * sum(counts.values()), 0.0
    kept: list[tuple[PodKind, float]] = []
    for task, count in ranked:
        if covered >= enough:
            break
        kept.append((task, count))
        covered += count
    if len(kept) <= MOST_POPULAR:
        return kept
    return _folded(kept[:MOST_POPULAR], kept[MOST_POPULAR : MOST_POPULAR + MOST_FOLDED])


def _folded(kept: list[tuple[PodKind, float]], rare: list[tuple[PodKind, float]]) -> list[tuple[PodKind, float]]:
    """Rare tasks count as the nearest frequent task: first by models and number of cards, then by size, then by CPU."""
    weights = dict(kept)
    tasks = list(weights)
    sizes = np.array([(task.cards, task.size * 100, task.cpu / 1000) for task in tasks], dtype=np.float64)
    for task, count in rare:
        distance = np.abs(sizes - (task.cards, task.size * 100, task.cpu / 1000)) @ FAR
        distance += np.array([FAR_MODELS * (task.model_set != other.model_set) for other in tasks])
        weights[tasks[int(distance.argmin())]] += count
    return list(weights.items())


def heaviest(demand: dict[int, float]) -> dict[int, float]:
    """The fractions that use most of the cards; each fraction makes the linear programme larger. The others count as
    the next larger fraction that is kept (a tile fits where a larger one fits), or as the largest."""
    if len(demand) <= MOST_FRACTIONS:
        return demand
    kept = sorted(sorted(demand, key=lambda share: (-share * demand[share], share))[:MOST_FRACTIONS])
    folded = {share: demand[share] for share in kept}
    for share in demand.keys() - folded.keys():
        folded[next((larger for larger in kept if larger > share), kept[-1])] += demand[share]
    return folded


def _fractions(counts: dict[PodKind, float]) -> dict[int, float]:
    demand: dict[int, float] = {}
    for task, count in counts.items():
        if task.cards and task.share < 100:
            demand[task.share] = demand.get(task.share, 0.0) + count * task.cards
    return demand


def _cpu_per_card(counts: dict[PodKind, float]) -> float:
    gpu = [(task, count) for task, count in counts.items() if task.cards]
    cards = sum(task.size * count for task, count in gpu)
    return sum(task.cpu * count for task, count in gpu) / cards if cards else 0.0


def model_prices(counts: dict[PodKind, float], supply: Supply) -> NDArray[np.float64]:
    """By model: how scarce its cards are. 1 everywhere when all pods accept all models.

    The price of a set of models that pods require rises as the set fills up: the demand for the set, times all free
    cards over the free cards in the set.
    """
    free = np.array(supply.free)
    demand: dict[ModelSet, float] = {}
    for task, count in counts.items():
        if task.cards:
            demand[task.model_set] = demand.get(task.model_set, 0.0) + task.size * count
    if len(demand) > MOST_MODEL_SETS:
        demand = dict(sorted(demand.items(), key=lambda entry: -entry[1])[:MOST_MODEL_SETS])
    price = np.zeros(len(free))
    total = sum(demand.values())
    for (models, not_models), cards in demand.items():
        kind = PodKind(0, 1, 100, models, not_models)
        inside = np.array([kind.accepts(model) for model in supply.models], dtype=np.bool_)
        price[inside] += cards / total * free.sum() / max(float(free[inside].sum()), 1e-9)
    return price if total else np.ones(len(free))


def cpu_asked_per_card(counts: dict[PodKind, float]) -> float:
    """Millicores per card over all pods, including pods without GPU."""
    cards = sum(task.size * count for task, count in counts.items())
    return sum(task.cpu * count for task, count in counts.items()) / cards if cards else 0.0
