"""The cards of all nodes as arrays, updated node by node and pod by pod; the base of `fleet.Fleet`.

A node has one row number: its column in the arrays of `grid`. Rows of removed nodes are reused. The arrays know how
much is held; the ledger knows which pods hold it.
"""

import copy
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from gputile.engine.fleet.free_arrays import FreeArrays, Mask
from gputile.engine.placement.shares import CARD, free_share
from gputile.model.cards import Card, FreeCapacity, Node, NodeView, Use
from gputile.model.requests import CardKind, Constraints, QuotaAllowance


class FleetArrays:
    """The cards of the cluster, and what is free on them."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._nodes: list[Node | None] = []
        self._places: list[dict[str, int]] = []  # by row: card UUID to its position
        self._vacant: list[int] = []
        self._models: dict[str, int] = {}
        self._modes: dict[str, int] = {}
        self._card_kinds: dict[CardKind, int] = {}
        self._pools: dict[str, int] = {"": 0}
        self._links: dict[tuple[tuple[int, ...], ...], int] = {(): 0}
        self._kinds: dict[tuple[object, ...], int] = {}
        self._kind: list[int] = []  # by row: nodes of one kind differ only in names and in what pods hold
        self._eligible: dict[tuple[Any, ...], Mask] = {}
        self._average: int | None = None
        self._node_prices: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None  # by model, by row
        self._generation = 0  # counts changes, as in kube-scheduler's cache; `_touched` has the last one of each row
        self._capacity_generation = 0  # counts changes that may have freed capacity
        self._allocate(cards=8, nodes=16)

    # ---- nodes and what is held of them -----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def names(self) -> list[str]:
        return list(self._rows)

    def node(self, name: str) -> Node | None:
        row = self._rows.get(name)
        return None if row is None else self._nodes[row]

    def set_node(self, node: Node) -> None:
        """Add or replace a node. It starts empty: the caller must `hold` again what pods hold of it."""
        row = self._rows.get(node.name)
        if row is None:
            row = self._vacant.pop() if self._vacant else len(self._nodes)
            if row == len(self._nodes):
                self._nodes.append(None)
                self._places.append({})
                self._kind.append(0)
            self._rows[node.name] = row
        self._grow(len(node.cards), row + 1)
        self._write_row(row, node)
        self._eligible.clear()

    def remove_node(self, name: str) -> None:
        row = self._rows.pop(name, None)
        if row is not None:
            self._write_row(row, Node(name=""))
            self._nodes[row] = None
            self._vacant.append(row)
            self._eligible.clear()

    def view(self, name: str) -> NodeView:
        """The node as `place` sees it."""
        return self._view(self._rows[name])

    def free_capacity(self, name: str, uuid: str) -> FreeCapacity | None:
        """What is free on one card of a known node; None if the node lacks the card."""
        row = self._rows[name]
        position = self._places[row].get(uuid)
        if position is None:
            return None
        at = position, row
        return FreeCapacity(int(self._memory[at]), int(self._cores[at]), int(self._slots[at]), int(self._tenants[at]))

    def hold(self, name: str, uses: Mapping[str, Use], cpu: int = 0, memory: int = 0) -> None:
        """Subtract what a pod uses from the node. Unknown nodes and cards are ignored."""
        self._apply(name, uses, cpu, memory, 1)

    def release(self, name: str, uses: Mapping[str, Use], cpu: int = 0, memory: int = 0) -> None:
        """Add back what `hold` subtracted."""
        self._apply(name, uses, cpu, memory, -1)

    def _apply(self, name: str, uses: Mapping[str, Use], cpu: int, memory: int, sign: int) -> None:
        row = self._rows.get(name)
        if row is None:
            return
        places = self._places[row]
        for uuid, use in uses.items():
            at = places.get(uuid, -1), row
            if at[0] < 0:
                continue
            size, core_size = int(self._size[at]), int(self._core_size[at])
            before = free_share(int(self._memory[at]), int(self._cores[at]), size, core_size)
            self._memory[at] -= sign * use.memory
            self._cores[at] -= sign * use.cores
            self._slots[at] -= sign * use.slots
            self._tenants[at] += sign
            if self._usable[at]:
                after = free_share(int(self._memory[at]), int(self._cores[at]), size, core_size)
                self._share[row] += after - before
                self._card_share[at] = after
        self._touch(row)
        self._capacity_generation += sign < 0
        self._cpu[row] -= sign * cpu
        self._host[row] -= sign * memory

    def part(self, names: Iterable[str]) -> Self:
        """A copy of these nodes by themselves: what is held there may be changed, and this fleet stays the same."""
        self.average_card()  # the part keeps the average of all cards
        part, rows = copy.copy(self), self._rows_of(list(names))
        columns = np.array(rows, dtype=np.intp)
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray):
                setattr(part, name, array.take(columns, axis=-1))
        part._nodes = [self._nodes[row] for row in rows]
        part._places = [self._places[row] for row in rows]
        part._kind = [self._kind[row] for row in rows]
        part._rows = {self._name(row): position for position, row in enumerate(rows)}
        part._eligible, part._node_prices = {}, None
        return part

    def free_shares_of(self, names: Iterable[str]) -> list[int]:
        """The free share of the usable cards of these nodes, in `shares.CARD` and in their order; all must be known."""
        return [int(self._share[self._rows[name]]) for name in names]

    def card_count(self) -> int:
        return int(self._exists[:, : len(self._nodes)].sum())

    def average_card(self) -> int:
        """MiB; recomputed when a node changes."""
        if self._average is None:
            exists = self._exists[:, : len(self._nodes)]
            self._average = int(self._size[:, : len(self._nodes)].sum()) // max(1, int(exists.sum()))
        return self._average

    def largest_card(self) -> int:
        """MiB; 0 if there are no cards."""
        return int(self._size.max(initial=0))

    def card_models(self) -> set[str]:
        """The models of all present cards; cards of unknown model are left out."""
        names = list(self._models)
        return {names[number] for number in np.unique(self._model[self._exists]).tolist()} - {""}

    def card_kinds(self) -> tuple[CardKind, ...]:
        """All kinds of cards that were ever seen, in order of appearance."""
        return tuple(self._card_kinds)

    def grid(self) -> FreeArrays:
        """The current arrays; views, not copies."""
        n = len(self._nodes)
        return FreeArrays(
            size=self._size[:, :n],
            memory=self._memory[:, :n],
            cores=self._cores[:, :n],
            slots=self._slots[:, :n],
            tenants=self._tenants[:, :n],
            cpu=self._cpu[:n],
            host=self._host[:n],
        )

    def empty_grid(self) -> FreeArrays:
        """The cluster with no pods on it."""
        n = len(self._nodes)
        size = self._size[:, :n]
        return FreeArrays(
            size=size,
            memory=size,
            cores=self._core_size[:, :n],
            slots=self._slot_size[:, :n],
            tenants=np.zeros_like(size),
            cpu=self._cpu_size[:n].astype(np.int64),
            host=self._host_size[:n],
        )

    # ---- upkeep of the arrays ---------------------------------------------------------------------------------------

    def _eligible_cards(self, rule: Constraints) -> Mask:
        """Usable cards that satisfy the constraints; cached until a node changes."""
        key = (rule.models, rule.not_models, rule.uuids, rule.not_uuids, rule.modes, rule.allowance)
        mask = self._eligible.get(key)
        if mask is None:
            n = len(self._nodes)
            mask = self._usable[:, :n] & self._model_mask(rule) & self._uuid_mask(rule) & self._mode_mask(rule)
            if rule.allowance is not None:
                mask = mask & self._pool_mask(rule.allowance) & self._card_kind_mask(rule.allowance.affordable)
            if len(self._eligible) >= 256:  # pods with UUID lists could fill memory with masks
                self._eligible.clear()
            self._eligible[key] = mask
        return mask

    def _model_mask(self, rule: Constraints) -> Mask:
        accepted = np.array([rule.accepts_model(model) for model in self._models] or [True])
        return accepted[self._model[:, : len(self._nodes)]]

    def _mode_mask(self, rule: Constraints) -> Mask:
        accepted = np.array([rule.accepts_mode(mode) and mode != "mig" for mode in self._modes] or [True])
        return accepted[self._mode[:, : len(self._nodes)]]

    def _card_kind_mask(self, among: frozenset[CardKind]) -> Mask:
        accepted = np.array([kind in among for kind in self._card_kinds] or [False])
        return accepted[self._card_kind[:, : len(self._nodes)]]

    def _pool_mask(self, allowance: QuotaAllowance) -> Mask:
        """By row, as a single line that counts for all cards of the node."""
        accepted = np.array([allowance.admits_pool(pool) for pool in self._pools])
        return accepted[self._pool[: len(self._nodes)]][np.newaxis, :]

    def _uuid_mask(self, rule: Constraints) -> Mask:
        mask = np.full((len(self._size), len(self._nodes)), not rule.uuids)
        for row, places in enumerate(self._places):
            if rule.uuids:
                for uuid in rule.uuids & places.keys():
                    mask[places[uuid], row] = True
            for uuid in rule.not_uuids & places.keys():
                mask[places[uuid], row] = False
        return mask

    def _allocate(self, cards: int, nodes: int) -> None:
        def ints() -> NDArray[np.int64]:
            return np.zeros((cards, nodes), dtype=np.int64)

        def flags() -> Mask:
            return np.zeros((cards, nodes), dtype=np.bool_)

        self._size, self._core_size, self._slot_size = ints(), ints(), ints()
        self._memory, self._cores, self._slots, self._tenants = ints(), ints(), ints(), ints()
        self._model, self._mode, self._numa, self._card_share = ints(), ints(), ints(), ints()
        self._card_kind = ints()
        self._exists, self._healthy, self._cordoned, self._usable = flags(), flags(), flags(), flags()
        self._cpu, self._host, self._share, self._host_size = (np.zeros(nodes, dtype=np.int64) for _ in range(4))
        self._cpu_size, self._per_mebibyte = np.zeros(nodes), np.zeros(nodes)
        self._in_use = np.zeros(nodes, dtype=np.bool_)
        self._link, self._touched, self._pool = (np.zeros(nodes, dtype=np.int64) for _ in range(3))

    def _grow(self, cards: int, nodes: int) -> None:
        """Grow the arrays to this size, doubling, so that growing stays cheap."""
        had_cards, had_nodes = self._size.shape
        if cards <= had_cards and nodes <= had_nodes:
            return
        old = dict(vars(self))
        self._allocate(max(cards, had_cards), max(nodes, had_nodes if nodes <= had_nodes else 2 * had_nodes))
        for name, array in vars(self).items():
            before = old[name]
            if isinstance(before, np.ndarray) and before is not array:
                array[tuple(slice(0, length) for length in before.shape)] = before

    def _write_row(self, row: int, node: Node) -> None:
        self._nodes[row] = node
        self._places[row] = {card.uuid: position for position, card in enumerate(node.cards)}
        for array in (self._exists, self._healthy, self._cordoned, self._usable, self._size):
            array[:, row] = 0
        for array in (self._memory, self._cores, self._slots, self._tenants, self._core_size, self._slot_size):
            array[:, row] = 0
        in_use = [card for card in node.cards if _usable(card, node)]
        for position, card in enumerate(node.cards):
            self._write_card(position, row, card)
        self._card_share[:, row] = 0
        for card in in_use:
            at = self._places[row][card.uuid], row
            self._usable[at] = True
            self._card_share[at] = free_share(card.memory, card.cores, card.memory, card.cores)
        self._touch(row)
        self._capacity_generation += 1
        self._average, self._node_prices = None, None
        self._in_use[row] = bool(node.name) and not node.fault
        self._cpu[row] = self._cpu_size[row] = node.cpu
        self._host[row] = self._host_size[row] = node.memory
        self._share[row] = self._card_share[:, row].sum()
        memory = sum(card.memory for card in node.cards)
        self._per_mebibyte[row] = CARD * len(node.cards) / memory if memory else 0.0
        self._link[row] = self._links.setdefault(node.links, len(self._links))
        self._pool[row] = self._pools.setdefault(node.pool, len(self._pools))
        self._kind[row] = self._kinds.setdefault(_kind(node), len(self._kinds))

    def _write_card(self, position: int, row: int, card: Card) -> None:
        at = position, row
        self._exists[at], self._healthy[at], self._cordoned[at] = True, card.healthy, card.cordoned
        self._size[at] = self._memory[at] = card.memory
        self._core_size[at] = self._cores[at] = card.cores
        self._slot_size[at] = self._slots[at] = card.slots
        self._numa[at] = card.numa
        self._model[at] = self._models.setdefault(card.model, len(self._models))
        self._mode[at] = self._modes.setdefault(card.mode, len(self._modes))
        self._card_kind[at] = self._card_kinds.setdefault((card.model, card.memory), len(self._card_kinds))

    def state(self, row: int) -> tuple[int, bytes]:
        """Everything that an answer about the node depends on, except names, links and NUMA nodes."""
        memory, cores = self._memory[:, row].tobytes(), self._cores[:, row].tobytes()
        slots, tenants = self._slots[:, row].tobytes(), self._tenants[:, row].tobytes()
        host = self._cpu[row].tobytes() + self._host[row].tobytes()
        return self._kind[row], b"".join((memory, cores, slots, tenants, host))

    def cards_state(self, row: int, *, empty: bool = False) -> tuple[int, bytes]:
        """Everything that an answer about the node's cards depends on, except names and eligibility; with `empty`, as
        if no pods were on them."""
        free = (self._core_size, self._slot_size) if empty else (self._memory, self._cores, self._slots, self._tenants)
        state = b"".join(array[:, row].tobytes() for array in (self._size, self._numa, *free))
        return int(self._link[row]), state

    def _touch(self, row: int) -> None:
        self._generation += 1
        self._touched[row] = self._generation

    def _view(self, row: int) -> NodeView:
        node = self._known(row)
        columns = (self._memory, self._cores, self._slots, self._tenants)
        lines = zip(*(array[: len(node.cards), row].tolist() for array in columns), strict=True)
        return NodeView(
            node=node,
            free_by_card=tuple(FreeCapacity(*line) for line in lines),
            cpu=int(self._cpu[row]),
            memory=int(self._host[row]),
        )

    def _known(self, row: int) -> Node:
        node = self._nodes[row]
        assert node is not None, "the node was removed"
        return node

    def _name(self, row: int) -> str:
        return self._known(row).name

    def named(self, names: Iterable[str]) -> Mask:
        """By row: whether the node is among these."""
        mask = np.zeros(len(self._nodes), dtype=np.bool_)
        mask[self._rows_of(list(names))] = True
        return mask

    def _rows_of(self, names: list[str]) -> list[int]:
        """Rows of the known nodes. The hottest line of a filter call, so itemgetter does the lookups."""
        try:
            return list(itemgetter(*names)(self._rows)) if len(names) > 1 else [self._rows[name] for name in names]
        except KeyError:  # an unknown node among them, which is rare
            return [self._rows[name] for name in names if name in self._rows]


def _usable(card: Card, node: Node) -> bool:
    return card.healthy and not card.cordoned and not card.in_mig_mode and not node.fault


def _kind(node: Node) -> tuple[object, ...]:
    cards = tuple((c.memory, c.cores, c.slots, c.model, c.mode, c.healthy, c.cordoned) for c in node.cards)
    return cards, node.pool, node.fault, bool(node.name)  # an unused row differs from a node without cards
