"""What a pod requests, in one form for all dialects.

`dialects` parses pods into a `PodRequest`, `engine` places it. `phases` defines which containers run at the same time.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TypeAlias

import msgspec

from gputile.model.units import ALL, MiB, Millicores, Percent


class Role(StrEnum):
    """When a container runs."""

    APP = "app"
    SIDECAR = "sidecar"  # an init container with restartPolicy Always: runs beside all containers that start after it
    INIT = "init"  # runs alone, before the others


class Strength(StrEnum):
    """Whether a pod prefers or requires a property."""

    NO = "no"
    PREFER = "prefer"
    REQUIRE = "require"


class Match(StrEnum):
    """How a name in a list is compared with a card's model.

    Upper and lower case are equal. Blanks, dashes and underscores are equal too: node labels cannot hold blanks.
    """

    NAME = "name"  # part of the model, but never half a number: "A10" does not match "A100"
    SUBSTRING = "substring"  # any part of the model, as HAMi and vgpu-manager compare


class ModelRule(msgspec.Struct, frozen=True):
    """A list of model names, at least one of which must match."""

    names: tuple[str, ...]
    match: Match = Match.NAME

    def accepts(self, model: str) -> bool:
        return any(_matches(_plain(name), _plain(model), self.match) for name in self.names)


def _plain(text: str) -> str:
    return text.lower().replace("-", " ").replace("_", " ")


def _matches(name: str, model: str, match: Match) -> bool:
    if match is Match.SUBSTRING:
        return name in model
    start = model.find(name)
    while start >= 0:
        end = start + len(name)
        if not (_cuts_number(model, start) or _cuts_number(model, end)):
            return True
        start = model.find(name, start + 1)
    return False


def _cuts_number(text: str, at: int) -> bool:
    return 0 < at < len(text) and text[at - 1].isdigit() and text[at].isdigit()


CardKind: TypeAlias = tuple[str, MiB]
"""Model and memory of a card: a tile costs the same quota on all cards of one kind."""


class QuotaAllowance(msgspec.Struct, frozen=True):
    """What the quota of the pod's namespace allows the pod at one moment."""

    pools: frozenset[str]  # empty: nodes of any pool
    listed: frozenset[CardKind]  # kinds of cards that a limit of the quota covers
    possible: frozenset[CardKind]  # kinds the pod could have if its namespace held nothing
    affordable: frozenset[CardKind]  # kinds the pod may have now

    def admits_pool(self, pool: str) -> bool:
        return not self.pools or pool in self.pools


class Constraints(msgspec.Struct, frozen=True, kw_only=True):
    """Which cards may serve the pod, and which policy chooses among them."""

    models: tuple[ModelRule, ...] = ()  # all of them must accept the card
    not_models: tuple[ModelRule, ...] = ()  # none of them may accept the card
    uuids: frozenset[str] = frozenset()  # empty: any card
    not_uuids: frozenset[str] = frozenset()
    modes: frozenset[str] = frozenset()  # sharing modes allowed; a card of unknown mode passes
    numa: Strength = Strength.NO  # all cards of one container from one NUMA node
    links: Strength = Strength.NO  # all cards of one container linked with each other
    idle: bool = False  # only cards without pods
    node_policy: str | None = None  # None: the cluster's default
    card_policy: str | None = None
    allowance: QuotaAllowance | None = None  # None: no quota applies

    def accepts_model(self, model: str) -> bool:
        if not self.models and not self.not_models:
            return True
        accepted = all(rule.accepts(model) for rule in self.models)
        return accepted and not any(rule.accepts(model) for rule in self.not_models)

    def accepts_uuid(self, uuid: str) -> bool:
        return (not self.uuids or uuid in self.uuids) and uuid not in self.not_uuids

    def accepts_mode(self, mode: str) -> bool:
        return not self.modes or not mode or mode in self.modes


class ContainerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What one container requests. The other fields have no meaning when `cards` is 0."""

    container: str
    role: Role = Role.APP
    cards: int = 0
    memory: MiB | None = None  # per card; None: `memory_percent` counts
    memory_percent: Percent | None = None  # of the chosen card, rounded down to MiB
    cores: Percent = 0  # per card; 0 reserves none
    exclusive: bool = False  # a card without other tiles

    @classmethod
    def whole(cls, container: str, role: Role, cards: int) -> "ContainerRequest":
        """Whole cards, not shared with other pods."""
        return cls(container=container, role=role, cards=cards, memory_percent=ALL, cores=ALL, exclusive=True)

    def memory_of(self, card_memory: MiB) -> MiB:
        """The memory requested of a card of this size."""
        return self.memory if self.memory is not None else card_memory * (self.memory_percent or 0) // ALL


class PodRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What one pod requests. `asks` has the request of every container in order, init containers first."""

    dialect: str
    asks: tuple[ContainerRequest, ...]
    together: bool = False  # all containers on the same card or cards, as gpushare guarantees
    constraints: Constraints = Constraints()
    cpu: Millicores = 0
    memory: MiB = 0  # host memory
    block: MiB = 1  # GPU memory per card can be requested in multiples of this
    slots: int = 1  # that one tile takes of its card; 0 in dialects that do not count slots
    warnings: tuple[str, ...] = ()  # for the author of the pod; they do not change the decision

    @property
    def with_unused_quota(self) -> "PodRequest":
        """The request if its namespace held nothing; the same object where that makes no difference."""
        allowance = self.constraints.allowance
        if allowance is None or allowance.affordable == allowance.possible:
            return self
        return self.allowed(msgspec.structs.replace(allowance, affordable=allowance.possible))

    def allowed(self, allowance: QuotaAllowance | None) -> "PodRequest":
        """The same request under this allowance."""
        rule = msgspec.structs.replace(self.constraints, allowance=allowance)
        return msgspec.structs.replace(self, constraints=rule)


def phases(roles: Sequence[Role]) -> list[tuple[int, ...]]:
    """For each container the phases in which it runs. Tiles of one phase add up; phases reuse the same capacity.

    Phase 0 is the pod's main phase, phase n the run of its n-th init container. Sidecars run in phase 0 and beside
    every init container that starts after them. Kubernetes counts the same way; gputile does it for each card.
    """
    inits = sum(role is Role.INIT for role in roles)
    running: list[tuple[int, ...]] = []
    started = 0
    for role in roles:
        if role is Role.INIT:
            started += 1
            running.append((started,))
        elif role is Role.SIDECAR:
            running.append((0, *range(started + 1, inits + 1)))
        else:
            running.append((0,))
    return running


Amounts: TypeAlias = tuple[int, ...]


def most_at_once(parts: Iterable[tuple[Role, Amounts]], kinds: int) -> Amounts:
    """The most that the containers use at any time, by kind of amount (memory, cores, ...), as `phases` defines it.

    One pass in the pod's order: a tenant chooses the number of containers, and sidecars times init containers may be
    millions of pairs. Sidecars keep running; an init container adds to the sidecars before it and then ends.
    """
    lasting, peak, main = (0,) * kinds, (0,) * kinds, (0,) * kinds
    for role, amounts in parts:
        if role is Role.SIDECAR:
            lasting = _added(lasting, amounts)
        elif role is Role.INIT:
            peak = _larger(peak, _added(lasting, amounts))
        else:
            main = _added(main, amounts)
    return _larger(peak, _added(lasting, main))


def _added(amounts: Amounts, other: Amounts) -> Amounts:
    return tuple(a + b for a, b in zip(amounts, other, strict=True))


def _larger(amounts: Amounts, other: Amounts) -> Amounts:
    return tuple(map(max, amounts, other))
