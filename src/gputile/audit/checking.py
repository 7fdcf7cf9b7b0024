"""The proof itself: every card's sum, and every grant with its pod.

Room:  pure functions over pods and nodes; the time comes in as a number.
Door:  `audit(nodes, pods, ...)`.

What a pod holds of a card is the most its containers hold of it at one time: init containers run one after the other,
sidecars beside all that start after them, the others together. Which container is what is read from the pod, not from
its grant. Pods that are gone and whose containers still run, as the agent of their node says, hold what they held.
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime

import msgspec

from gputile.audit.report import Code, Held, Notice, Report, SeenPod
from gputile.audit.room import Free, could_take
from gputile.dialects import gpushare
from gputile.dialects.gputile import GRANT, granted_at
from gputile.dialects.records import read_grant
from gputile.dialects.settings import DialectSettings
from gputile.dialects.speaking import read_lingering, read_node, read_pod
from gputile.dialects.wire import NodeObject
from gputile.model.cards import Card, Node
from gputile.model.grants import Grant
from gputile.model.refusals import BadRequest, NodeCode
from gputile.model.requests import SLOT_DIALECTS, PodRequest, Role

DELETED = "deleted"  # the phase, so to speak, of a pod that is gone
YOUNG = 60.0  # seconds that the leader has to grant cards to a pod that was bound around it
DIMENSIONS = ("memory", "cores", "slots")
UNITS = {"memory": "MiB", "cores": "% of its cores", "slots": "slots"}


def audit(
    nodes: Iterable[NodeObject], pods: Iterable[SeenPod], settings: DialectSettings | None = None, now: float = 0.0
) -> Report:
    """`now` in seconds since 1970."""
    objects = list(nodes)
    settings = gpushare.resolved(settings or DialectSettings(), objects)
    return _Audit(objects, settings, now).report(pods)


class _Audit:
    """One look at one cluster."""

    def __init__(self, objects: list[NodeObject], settings: DialectSettings, now: float) -> None:
        self._settings, self._now = settings, now
        self._findings: list[Notice] = []
        self._remarks: list[Notice] = []
        self._nodes: dict[str, Node] = {}
        self._homes: dict[str, str] = {}  # by card: its node
        self._sold: dict[str, list[Held]] = {}
        self._waiting: list[tuple[SeenPod, PodRequest]] = []
        self._lingering: list[Grant] = []
        self._holding = 0
        for found in objects:
            self._see_node(found)

    def report(self, pods: Iterable[SeenPod]) -> Report:
        alive: set[str] = set()
        for pod in pods:
            if not pod.is_over:
                alive.add(pod.uid)
                self._see_pod(pod)
        for grant in self._lingering:
            if grant.pod not in alive:
                self._see_lingering(grant)
        for node in self._nodes.values():
            for card in node.cards:
                self._see_card(node, card)
        self._see_waiting()
        cards = [card for node in self._nodes.values() for card in node.cards]
        return Report(
            nodes=sum(bool(node.cards) for node in self._nodes.values()),
            cards=len(cards),
            pods=self._holding,
            waiting=len(self._waiting),
            memory=sum(card.memory for card in cards),
            memory_sold=sum(held.memory for found in self._sold.values() for held in found),
            findings=tuple(self._findings),
            remarks=tuple(self._remarks),
            sold={uuid: tuple(found) for uuid, found in self._sold.items()},
        )

    # ---- nodes and cards --------------------------------------------------------------------------------------------

    def _see_node(self, found: NodeObject) -> None:
        node = read_node(found, self._settings)
        if isinstance(node, BadRequest) or node.fault == NodeCode.BAD_INVENTORY:
            why = node.message if isinstance(node, BadRequest) else "what it says of its cards cannot be read"
            self._find(Code.UNREADABLE_NODE, f"node {found.name}: {why}", "look at its annotations", node=found.name)
            return
        self._nodes[node.name] = node
        lingering = read_lingering(found, node.cards)
        if isinstance(lingering, BadRequest):
            todo = "restart the node's agent, or remove the annotation if it has none"
            self._find(Code.UNREADABLE_NODE, f"node {node.name}: {lingering.message}", todo, node=node.name)
        else:
            self._lingering += lingering
        for card in node.cards:
            if card.uuid in self._homes:
                what = f"card {card.uuid} is said to be in node {self._homes[card.uuid]} and in node {node.name}"
                todo = "one of them tells of cards it does not have; restart its agent, or correct its annotation"
                self._find(Code.CARD_ON_TWO_NODES, what, todo, node=node.name, card=card)
            self._homes[card.uuid] = node.name

    def _see_card(self, node: Node, card: Card) -> None:
        held = sorted(self._sold.get(card.uuid, ()), key=lambda one: (one.bound, one.granted, one.pod))
        over = [what for what in DIMENSIONS if _sum(held, what) > getattr(card, what)]
        if over:
            self._oversold(node, card, held, over)
        elif held and not (card.healthy and not card.cordoned):
            why = f"unhealthy ({card.reason or 'no reason given'})" if not card.healthy else "cordoned"
            what = f"card {card.uuid} of node {node.name} is {why} and in use"
            self._remark(Code.OUT_OF_USE, what, node=node.name, card=card, holders=tuple(held))

    def _oversold(self, node: Node, card: Card, held: list[Held], over: list[str]) -> None:
        sums = [f"{_sum(held, what)} of {getattr(card, what)} {UNITS[what]}" for what in over]
        what = f"card {card.uuid} of node {node.name} is sold beyond its size: {' and '.join(sums)} are held"
        self._find(Code.OVERSOLD, what, _cure(held), node=node.name, card=card, holders=tuple(held))

    # ---- pods -------------------------------------------------------------------------------------------------------

    def _see_pod(self, pod: SeenPod) -> None:
        asked = read_pod(pod, self._settings)
        if not pod.node_name:
            if isinstance(asked, PodRequest) and not pod.is_going:
                self._waiting.append((pod, asked))
            return
        node = self._nodes.get(pod.node_name)
        grant = read_grant(pod, node, self._settings)
        if isinstance(grant, BadRequest):
            if GRANT in pod.annotations:
                self._bad_grant(pod, grant)
        elif grant is not None:
            self._holding += 1
            self._see_grant(pod, asked if isinstance(asked, PodRequest) else None, grant, node)
        elif isinstance(asked, PodRequest):
            self._ungranted(pod)

    def _bad_grant(self, pod: SeenPod, bad: BadRequest) -> None:
        code = Code.NOT_ITS_GRANT if "belongs to pod" in bad.message else Code.UNREADABLE_GRANT
        todo = f"it is not believed; the leader writes another. If it stays: kubectl {_delete(pod.key)}"
        self._find(code, f"pod {pod.key}: {bad.message}", todo, node=pod.node_name, pod=pod.key)

    def _ungranted(self, pod: SeenPod) -> None:
        age = self._now - seconds(pod.bound_at or _created(pod))
        what = f"pod {pod.key} is bound to node {pod.node_name}, asks for cards and has no grant"
        if age < YOUNG:
            self._remark(Code.NO_GRANT, f"{what} yet: the leader has a minute", node=pod.node_name, pod=pod.key)
        else:
            todo = f"see its events, and whether a gputile scheduler leads; else: kubectl {_delete(pod.key)}"
            self._find(Code.NO_GRANT, what, todo, node=pod.node_name, pod=pod.key)

    def _see_grant(self, pod: SeenPod, asked: PodRequest | None, grant: Grant, node: Node | None) -> None:
        if node is None:
            what = f"pod {pod.key} is on node {pod.node_name}, which is gone or cannot be read"
            self._remark(Code.NODE_GONE, what, node=pod.node_name, pod=pod.key)
            return
        roles = {container.name: role for role, container in pod.containers()}
        cards = {card.uuid for card in node.cards}
        for held in grant.containers:
            if roles.get(held.container) is not held.role:
                said = f"its grant names a container `{held.container}` ({held.role}), which the pod does not have"
                self._find_in(pod, Code.NO_SUCH_CONTAINER, said)
            strange = sorted({tile.uuid for tile in held.tiles} - cards)
            if strange:
                said = f"its grant names cards that node {node.name} does not have: {', '.join(strange)}"
                self._find_in(pod, Code.NO_SUCH_CARD, said)
        if asked is not None and GRANT in pod.annotations:
            self._compare(pod, asked, grant)
        for uuid, (memory, cores, slots) in holds(grant, roles).items():
            if uuid in cards:
                self._sold.setdefault(uuid, []).append(_held(pod, grant, memory, cores, slots))

    def _see_lingering(self, grant: Grant) -> None:
        what = f"containers of pod {grant.pod}, which was deleted, still run on node {grant.node} and hold their cards"
        self._remark(Code.LINGERING, what, node=grant.node)
        cards = {card.uuid for card in self._nodes[grant.node].cards}
        for uuid, amounts in holds(grant, {held.container: held.role for held in grant.containers}).items():
            if uuid in cards:
                held = Held(f"{DELETED}/{grant.pod}", grant.pod, *amounts, by="gputile", phase=DELETED)
                self._sold.setdefault(uuid, []).append(held)

    def _find_in(self, pod: SeenPod, code: Code, said: str) -> None:
        todo = f"kubectl {_delete(pod.key)}, so that it gets a new one; and find out who wrote it"
        self._find(code, f"pod {pod.key}: {said}", todo, node=pod.node_name, pod=pod.key)

    def _compare(self, pod: SeenPod, asked: PodRequest, grant: Grant) -> None:
        given = {held.container: [(tile.memory, tile.cores) for tile in held.tiles] for held in grant.containers}
        for ask in asked.asks:
            tiles = given.get(ask.container, [])
            if len(tiles) != ask.cards:
                said = f"container `{ask.container}` asks for {ask.cards} cards and was granted {len(tiles)}"
            elif ask.memory is not None and any(tile != (ask.memory, ask.cores) for tile in tiles):
                said = f"container `{ask.container}` asks for {ask.memory} MiB, {ask.cores} %, and was granted {tiles}"
            else:
                continue
            self._remark(Code.NOT_AS_ASKED, f"pod {pod.key}: {said}", node=pod.node_name, pod=pod.key)

    # ---- those who wait ---------------------------------------------------------------------------------------------

    def _see_waiting(self) -> None:
        """Pods of which we can tell that a card would take them. Taints, CPU and affinity may still forbid it."""
        if not self._waiting:
            return
        free = {name: [self._free(card) for card in node.cards] for name, node in self._nodes.items()}
        known: dict[PodRequest, list[str]] = {}
        for pod, asked in self._waiting:
            kind = msgspec.structs.replace(asked, warnings=())
            if kind not in known:
                known[kind] = could_take(kind, free) or []
            if known[kind] and self._now - seconds(_created(pod)) >= YOUNG:
                what = f"pod {pod.key} waits, and cards of {len(known[kind])} nodes have room for it: "
                what += f"{', '.join(known[kind][:3])}; see its events for what else it needs"
                self._remark(Code.COULD_GO, what, pod=pod.key)

    def _free(self, card: Card) -> Free:
        held = self._sold.get(card.uuid, [])
        memory, cores, slots = (getattr(card, what) - _sum(held, what) for what in DIMENSIONS)
        return Free(card, memory, cores, slots, len(held))

    # ---- writing down -----------------------------------------------------------------------------------------------

    def _find(
        self,
        code: Code,
        what: str,
        todo: str,
        *,
        node: str = "",
        pod: str = "",
        card: Card | None = None,
        holders: tuple[Held, ...] = (),
    ) -> None:
        self._findings.append(Notice(code=code, what=what, todo=todo, node=node, pod=pod, card=card, holders=holders))

    def _remark(
        self,
        code: Code,
        what: str,
        *,
        node: str = "",
        pod: str = "",
        card: Card | None = None,
        holders: tuple[Held, ...] = (),
    ) -> None:
        self._remarks.append(Notice(code=code, what=what, node=node, pod=pod, card=card, holders=holders))


# ---- sums -----------------------------------------------------------------------------------------------------------


def holds(grant: Grant, roles: Mapping[str, Role]) -> dict[str, tuple[int, int, int]]:
    """By card: memory, cores and slots, at the moment when the pod holds most of each. Roles in the pod's order.

    A container that the pod does not have counts as one that runs all the time.
    """
    slot = int(grant.dialect in SLOT_DIALECTS)
    tiles = {held.container: held.tiles for held in grant.containers}
    order = [*roles, *(name for name in tiles if name not in roles)]
    beside: dict[str, list[int]] = {}  # sidecars that run already
    lasting: dict[str, list[int]] = {}  # all that run in the end
    most: dict[str, list[int]] = {}
    for name in order:
        role = roles.get(name, Role.APP)
        own: dict[str, list[int]] = {}
        for tile in tiles.get(name, ()):
            _add(own, tile.uuid, (tile.memory, tile.cores, slot))
        for uuid, amounts in own.items():
            if role is Role.INIT:
                running = beside.get(uuid, [0, 0, 0])
                _raise(most, uuid, [a + b for a, b in zip(amounts, running, strict=True)])
            else:
                _add(lasting, uuid, amounts)
            if role is Role.SIDECAR:
                _add(beside, uuid, amounts)
    for uuid, amounts in lasting.items():
        _raise(most, uuid, amounts)
    return {uuid: (found[0], found[1], found[2]) for uuid, found in most.items()}


def _add(sums: dict[str, list[int]], uuid: str, amounts: Iterable[int]) -> None:
    sums[uuid] = [a + b for a, b in zip(sums.get(uuid, (0, 0, 0)), amounts, strict=True)]


def _raise(most: dict[str, list[int]], uuid: str, amounts: Iterable[int]) -> None:
    most[uuid] = [max(a, b) for a, b in zip(most.get(uuid, (0, 0, 0)), amounts, strict=True)]


def _sum(held: Iterable[Held], what: str) -> int:
    return sum(getattr(one, what) for one in held)


# ---- words and times ------------------------------------------------------------------------------------------------


def _held(pod: SeenPod, grant: Grant, memory: int, cores: int, slots: int) -> Held:
    at = granted_at(pod)
    return Held(
        pod=pod.key,
        uid=pod.uid,
        memory=memory,
        cores=cores,
        slots=slots,
        by="gputile" if GRANT in pod.annotations else grant.dialect,
        granted=datetime.fromtimestamp(at / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if at > 0 else "",
        bound=pod.bound_at,
        phase=(pod.status and pod.status.phase) or "",
        going=pod.is_going,
    )


def _cure(held: list[Held]) -> str:
    """What to do about a card that is sold twice."""
    if any(one.going for one in held):
        return "a pod on it is being deleted; look again in a moment"
    if any(one.phase == DELETED for one in held):
        return "containers of a deleted pod still run on it; end them on the node, or wait until they have ended"
    others = sorted({one.by for one in held} - {"gputile"})
    if others:
        return (
            f"the records of {', '.join(others)} are among them; if that system oversells on purpose, this is its size"
        )
    return (
        "the leader evicts the pod that came last when this is fresh (Event SoldTwice); if it stays: "
        f"kubectl {_delete(held[-1].pod)}"
    )


def _delete(key: str) -> str:
    namespace, _, name = key.partition("/")
    return f"-n {namespace} delete pod {name}"


def _created(pod: SeenPod) -> str:
    return (pod.metadata and pod.metadata.creation_timestamp) or ""


def seconds(said: str) -> float:
    """A time of Kubernetes in seconds since 1970; 0 when it says none."""
    try:
        return datetime.fromisoformat(said).timestamp()
    except ValueError:
        return 0.0


def stories(notices: Iterable[Notice]) -> Iterator[str]:
    """Each notice as lines for a person."""
    for notice in notices:
        yield notice.what
        for number, held in enumerate(notice.holders, start=1):
            since = held.bound or held.granted or "(nobody says since when)"
            last = ", came last" if number == len(notice.holders) > 1 else ""
            state = f"{held.phase or 'no phase'}{', being deleted' if held.going else ''}"
            yield f"  {held.memory:>8} MiB {held.cores:>4} %  {held.pod}, since {since}, {state}, by {held.by}{last}"
        if notice.todo:
            yield f"  what to do: {notice.todo}"
