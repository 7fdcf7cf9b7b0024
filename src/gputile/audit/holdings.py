"""What one pod holds: how much of which GPU, and how much on GPUs that no record names.

Containers that run at the same time add up. Init containers run one after the other, sidecars beside all that start
after them. The role of a container is read from the pod, never from a record.
"""

from collections.abc import Iterable, Iterator

import msgspec

from gputile.audit.objects import AuditedPod
from gputile.audit.records.readers import takes_slots
from gputile.audit.records.record import Record, RecordedTile
from gputile.audit.requests import AuditedContainerRequest, AuditedRequest
from gputile.audit.sizes import NodeGpus
from gputile.model.cards import Card
from gputile.model.requests import Role
from gputile.model.units import ALL, MiB, Percent

SOMEWHERE = ""
"""Stands for the UUID of the GPUs that no record names."""


class HeldAmounts(msgspec.Struct, frozen=True):
    """Amounts of one GPU; under SOMEWHERE of several GPUs together."""

    memory: MiB = 0
    cores: Percent = 0
    slots: int = 0
    whole: int = 0  # under SOMEWHERE: GPUs for the pod alone; their memory and cores are not in the sums above
    shares: int = 0  # under SOMEWHERE: the others

    def plus(self, other: "HeldAmounts") -> "HeldAmounts":
        return HeldAmounts(
            self.memory + other.memory,
            self.cores + other.cores,
            self.slots + other.slots,
            self.whole + other.whole,
            self.shares + other.shares,
        )

    def most(self, other: "HeldAmounts") -> "HeldAmounts":
        return HeldAmounts(
            max(self.memory, other.memory),
            max(self.cores, other.cores),
            max(self.slots, other.slots),
            max(self.whole, other.whole),
            max(self.shares, other.shares),
        )


NONE = HeldAmounts()
Holding = dict[str, HeldAmounts]  # by UUID, or SOMEWHERE


def at_once(containers: Iterable[tuple[Role, Holding]]) -> Holding:
    """The most that is held of each GPU at one time; containers in the order in which they start."""
    beside: Holding = {}  # of sidecars that run already
    lasting: Holding = {}  # of all containers that run in the end
    most: Holding = {}
    for role, own in containers:
        for gpu, amounts in own.items():
            if role is Role.INIT:
                most[gpu] = most.get(gpu, NONE).most(amounts.plus(beside.get(gpu, NONE)))
                continue
            lasting[gpu] = lasting.get(gpu, NONE).plus(amounts)
            if role is Role.SIDECAR:
                beside[gpu] = beside.get(gpu, NONE).plus(amounts)
    for gpu, amounts in lasting.items():
        most[gpu] = most.get(gpu, NONE).most(amounts)
    return most


def held(
    pod: AuditedPod, gpus: NodeGpus, request: AuditedRequest | None, record: Record | None, *, larger: bool
) -> Holding:
    """`larger`: of record and request the larger counts, and GPUs that only the request names count by number.

    Without it, the request only supplies the amounts where the record names a GPU and no amount.
    """
    return _Holder(pod, gpus, request, record, larger).holding()


class _Holder:
    """The calculation of one pod's holding."""

    def __init__(
        self, pod: AuditedPod, gpus: NodeGpus, request: AuditedRequest | None, record: Record | None, larger: bool
    ) -> None:
        self._pod, self._gpus, self._record = pod, gpus, record
        asks = () if request is None or (record is not None and record.is_nameless) else request.asks
        self._asks = {ask.container: ask for ask in asks}
        self._larger = larger and (record is None or request is None or request.is_readable)
        family = record.family if record else request.family if request else ""
        self._slot = int(record.takes_slots if record else takes_slots(family))
        self._tiles: dict[int, list[RecordedTile]] = {}
        for tile in record.tiles if record else ():
            self._tiles.setdefault(tile.container, []).append(tile)

    def holding(self) -> Holding:
        holding = at_once(self._containers())
        for uuid, memory in self._record.floors.items() if self._record else ():
            holding[uuid] = holding.get(uuid, NONE).most(HeldAmounts(memory=memory))
        return holding

    def _containers(self) -> Iterator[tuple[Role, Holding]]:
        named = self._record.gpus if self._record else ()
        for at, container in enumerate(self._pod.containers):
            yield container.role, self._container(at, container.role, named)
            self._tiles.pop(at, None)
        for at in self._tiles:  # containers that the pod does not have
            yield Role.APP, self._container(at, Role.APP, ())

    def _container(self, at: int, role: Role, named: tuple[str, ...]) -> Holding:
        ask, tiles = self._asks.get(at), self._tiles.get(at, ())
        own: Holding = {}
        for tile in tiles:
            gpu = self._gpus.by_uuid[tile.gpu]
            amounts = self._amounts(tile, ask, gpu)
            if amounts is not None:
                own[gpu.uuid] = own.get(gpu.uuid, NONE).plus(amounts)
        if ask is not None:
            self._add_rest(own, ask, ask.gpus - len(tiles), role, named)
        return own

    def _amounts(self, tile: RecordedTile, ask: AuditedContainerRequest | None, gpu: Card) -> HeldAmounts | None:
        """None: the record names a GPU for a container that requests none, as elastic-gpu does for sidecars."""
        if tile.memory is not None and tile.cores is not None:
            recorded = HeldAmounts(tile.memory, tile.cores, self._slot)
            if ask is None or tile.is_exact or not self._larger:
                return recorded
            return recorded.most(self._share(ask, gpu))
        return None if ask is None else self._share(ask, gpu)

    def _share(self, ask: AuditedContainerRequest, gpu: Card) -> HeldAmounts:
        return HeldAmounts(*ask.of(gpu), self._slot)

    def _add_rest(
        self, own: Holding, ask: AuditedContainerRequest, rest: int, role: Role, named: tuple[str, ...]
    ) -> None:
        """GPUs that the container requests and no tile of its own names.

        The kubelet reuses the devices of init containers, so these are on GPUs that the record names for the pod.
        """
        together = self._record is not None and self._record.together
        if rest > 0 and (together or (role is Role.INIT and self._larger)):
            free = [uuid for uuid in named if uuid not in own][:rest]
            own.update({uuid: self._share(ask, self._gpus.by_uuid[uuid]) for uuid in free})
            rest -= len(free)
        if rest > 0 and self._larger:
            own[SOMEWHERE] = self._unplaced(ask, rest)

    def _unplaced(self, ask: AuditedContainerRequest, gpus: int) -> HeldAmounts:
        if ask.is_whole:
            return HeldAmounts(slots=gpus * self._slot, whole=gpus)
        memory = self._gpus.smallest * ask.percent // ALL if ask.memory is None else ask.memory
        return HeldAmounts(memory * gpus, ask.cores * gpus, self._slot * gpus, shares=gpus)
