"""What a pod asks for, the same for every dialect.

Room:  `PodRequest` and its parts. `dialects/` makes them, `engine/` answers them.
Door:  `PodRequest`; `phases` says which containers run at the same time.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TypeAlias

import msgspec

from gputile.model.units import ALL, MiB, Millicores, Percent

SLOT_DIALECTS = frozenset({"gputile", "nvidia", "hami", "vgpu"})
"""Dialects whose device resource counts tiles, so that a card has a limited number of slots for them."""


class Role(StrEnum):
    """When a container runs."""

    APP = "app"
    SIDECAR = "sidecar"  # an init container with restartPolicy Always: runs beside all that start after it
    INIT = "init"  # runs alone, before the others


class Strength(StrEnum):
    """How much a pod insists on something."""

    NO = "no"
    PREFER = "prefer"
    REQUIRE = "require"


class Match(StrEnum):
    """How a name in a list is compared with a card's model.

    Case never counts, and blanks, dashes and underscores are alike: node labels cannot hold blanks.
    """

    NAME = "name"  # part of the model, but a number is never cut in two: "A10" is not "A100"
    SUBSTRING = "substring"  # any part of it, as HAMi and vgpu-manager compare


class ModelRule(msgspec.Struct, frozen=True):
    """A list of model names, of which one must match."""

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
"""Model and memory of a card: cards of one make cost a quota the same."""


class QuotaAllowance(msgspec.Struct, frozen=True):
    """What the quota of its namespace leaves to a pod at one moment."""

    pools: frozenset[str]  # empty: nodes of any pool
    listed: frozenset[CardKind]  # makes of which the quota speaks at all
    possible: frozenset[CardKind]  # those that the pod could have if its namespace held nothing
    affordable: frozenset[CardKind]  # those that it may have now

    def admits_pool(self, pool: str) -> bool:
        return not self.pools or pool in self.pools


class Constraints(msgspec.Struct, frozen=True, kw_only=True):
    """Which cards may serve the pod, and how to choose among them."""

    models: tuple[ModelRule, ...] = ()  # each of them must accept the card
    not_models: tuple[ModelRule, ...] = ()  # none of them may
    uuids: frozenset[str] = frozenset()  # empty: any card
    not_uuids: frozenset[str] = frozenset()
    modes: frozenset[str] = frozenset()  # sharing modes allowed; a card that names none passes
    numa: Strength = Strength.NO  # all cards of one container from one NUMA node
    links: Strength = Strength.NO  # all cards of one container linked with each other
    idle: bool = False  # only cards that nobody holds
    node_policy: str | None = None  # None: the cluster's default
    card_policy: str | None = None
    allowance: QuotaAllowance | None = None  # None: no quota stands in its way

    def accepts_model(self, model: str) -> bool:
        if not self.models and not self.not_models:
            return True
        wanted = all(rule.accepts(model) for rule in self.models)
        return wanted and not any(rule.accepts(model) for rule in self.not_models)

    def accepts_uuid(self, uuid: str) -> bool:
        return (not self.uuids or uuid in self.uuids) and uuid not in self.not_uuids

    def accepts_mode(self, mode: str) -> bool:
        return not self.modes or not mode or mode in self.modes


class ContainerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What one container asks for. With no cards the rest means nothing."""

    container: str
    role: Role = Role.APP
    cards: int = 0
    memory: MiB | None = None  # per card; None: `memory_percent` says it
    memory_percent: Percent | None = None  # of the card that is chosen, rounded down to MiB
    cores: Percent = 0  # per card; 0 reserves none
    exclusive: bool = False  # a card with nobody else on it

    @classmethod
    def whole(cls, container: str, role: Role, cards: int) -> "ContainerRequest":
        """Whole cards, shared with nobody."""
        return cls(container=container, role=role, cards=cards, memory_percent=ALL, cores=ALL, exclusive=True)

    def memory_of(self, card_memory: MiB) -> MiB:
        """The memory this asks for on a card of the given size."""
        return self.memory if self.memory is not None else card_memory * (self.memory_percent or 0) // ALL


class PodRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What one pod asks for. `asks` has every container in order, init containers first."""

    dialect: str
    asks: tuple[ContainerRequest, ...]
    together: bool = False  # all containers on the same card or cards (gpushare's promise)
    constraints: Constraints = Constraints()
    cpu: Millicores = 0
    memory: MiB = 0  # main memory
    block: MiB = 1  # GPU memory per card can be asked for in steps of this
    warnings: tuple[str, ...] = ()  # for the person who wrote the pod; they decide nothing

    @property
    def slots(self) -> int:
        """Slots that one tile takes of its card."""
        return int(self.dialect in SLOT_DIALECTS)

    @property
    def if_nobody_held(self) -> "PodRequest":
        """The same where its namespace holds nothing; the very same where that changes nothing."""
        allowance = self.constraints.allowance
        if allowance is None or allowance.affordable == allowance.possible:
            return self
        return self.allowed(msgspec.structs.replace(allowance, affordable=allowance.possible))

    def allowed(self, allowance: QuotaAllowance | None) -> "PodRequest":
        """The same under this allowance."""
        rule = msgspec.structs.replace(self.constraints, allowance=allowance)
        return msgspec.structs.replace(self, constraints=rule)


def phases(roles: Sequence[Role]) -> list[tuple[int, ...]]:
    """For each container the phases it is alive in; tiles of one phase add up, phases share the same room.

    Phase 0 is the pod's main life, phase n the run of its n-th init container. Sidecars live in phase 0 and in the
    run of every init container that starts after them: what Kubernetes counts, card by card.
    """
    inits = sum(role is Role.INIT for role in roles)
    alive: list[tuple[int, ...]] = []
    started = 0
    for role in roles:
        if role is Role.INIT:
            started += 1
            alive.append((started,))
        elif role is Role.SIDECAR:
            alive.append((0, *range(started + 1, inits + 1)))
        else:
            alive.append((0,))
    return alive


Amounts: TypeAlias = tuple[int, ...]


def most_at_once(parts: Iterable[tuple[Role, Amounts]], kinds: int) -> Amounts:
    """The most that containers take at any time, kind by kind (memory, cores, ...), as `phases` has it.

    One walk in the pod's order, because a tenant decides how many containers there are, and sidecars times init
    containers are millions: sidecars stay, an init container comes on top of those before it and goes again.
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


def _added(one: Amounts, other: Amounts) -> Amounts:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def _larger(one: Amounts, other: Amounts) -> Amounts:
    return tuple(map(max, one, other))
