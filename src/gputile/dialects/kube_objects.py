"""The few fields of Kubernetes objects that we read, and careful ways to read numbers and lists out of them.

Inside `dialects/` a bad value raises `UnreadableValue`; the doors in `speaking` turn it into a `BadRequest`. Nobody
outside sees the exception.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from gputile.dialects.settings import DEFAULTS, DialectSettings
from gputile.model.cards import Card
from gputile.model.grants import ContainerGrant, Grant, take
from gputile.model.refusals import BadRequest, RequestError
from gputile.model.requests import Constraints, ContainerRequest, PodRequest, Role, most_at_once
from gputile.model.units import LARGEST_CARD, MiB, Millicores, Quantity, host_mebibytes, millicores, quantity

Number: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**62), lt=2**62)]  # more digits are no number of anything
Weight: TypeAlias = Annotated[int, msgspec.Meta(gt=-(2**31), lt=2**31)]  # how closely two GPUs are linked, or not
Amounts: TypeAlias = dict[str, str | Number | float | None]
Text: TypeAlias = Mapping[str, str | Number | float | bool | None]
"""Labels or annotations. In a hand-written manifest a value may be a number; Kubernetes would refuse it, we read it."""

SHOWN = 60
"""Characters of a user's value that a message repeats."""

LONGEST_LIST = 256
"""Entries of a comma list: models or GPUs that a pod names. Each costs a comparison with every GPU of the cluster."""

LARGEST_NODE = 256
"""GPUs that an agent may list for one node. A table of their links is quadratic in it."""

TURNED_AWAY = frozenset({"UnexpectedAdmissionError", "TopologyAffinityError"})
"""Reasons of a kubelet that does not take a pod in. Where too little is left of something it says `OutOf<resource>`."""


class Resources(msgspec.Struct, frozen=True, gc=False):
    limits: Amounts | None = None
    requests: Amounts | None = None


class Container(msgspec.Struct, frozen=True, rename="camel", gc=False):
    name: str = ""
    resources: Resources | None = None
    restart_policy: str | None = None

    @property
    def shown(self) -> str:
        """Its name, as a message repeats it."""
        return shortened(self.name)


class Metadata(msgspec.Struct, frozen=True, rename="camel", gc=False):
    name: str | None = None
    generate_name: str | None = None
    namespace: str | None = None
    uid: str | None = None
    annotations: Text | None = None
    labels: Text | None = None
    resource_version: str | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None


class PodSpec(msgspec.Struct, frozen=True, rename="camel", gc=False):
    containers: tuple[Container, ...] | None = None
    init_containers: tuple[Container, ...] | None = None
    node_name: str | None = None
    overhead: Amounts | None = None
    priority: Number | None = None
    preemption_policy: str | None = None
    termination_grace_period_seconds: Number | None = None
    scheduler_name: str | None = None


class PodStatus(msgspec.Struct, frozen=True, rename="camel", gc=False):
    phase: str | None = None
    start_time: str | None = None
    nominated_node_name: str | None = None
    reason: str | None = None
    message: str | None = None


class Pod(msgspec.Struct, frozen=True, gc=False):
    metadata: Metadata | None = None
    spec: PodSpec | None = None
    status: PodStatus | None = None

    @property
    def annotations(self) -> Text:
        return (self.metadata and self.metadata.annotations) or {}

    @property
    def labels(self) -> Text:
        return (self.metadata and self.metadata.labels) or {}

    @property
    def uid(self) -> str:
        return (self.metadata and self.metadata.uid) or ""

    @property
    def name(self) -> str:
        return (self.metadata and (self.metadata.name or self.metadata.generate_name)) or ""

    @property
    def namespace(self) -> str:
        return (self.metadata and self.metadata.namespace) or "default"

    @property
    def node_name(self) -> str:
        return (self.spec and self.spec.node_name) or ""

    @property
    def key(self) -> str:
        """namespace/name, as people write it."""
        return f"{self.namespace}/{self.name}"

    @property
    def priority(self) -> int:
        return (self.spec and self.spec.priority) or 0

    @property
    def grace(self) -> int:
        """Seconds that it is given to end, once asked to."""
        said = self.spec.termination_grace_period_seconds if self.spec else None
        return 30 if said is None else max(0, said)

    @property
    def nominated(self) -> str:
        """The node where room is being made for it, or its volumes are prepared."""
        return (self.status and self.status.nominated_node_name) or ""

    @property
    def is_terminal(self) -> bool:
        """Completed or failed: its containers are gone. A pod that is only asked to go still holds its cards."""
        return bool(self.status and self.status.phase in ("Succeeded", "Failed"))

    @property
    def rejected_by_kubelet(self) -> bool:
        """The kubelet would not take it in, and has failed it for good; none of its containers ever ran."""
        reason = (self.status and self.status.reason) or ""
        return self.is_terminal and (reason in TURNED_AWAY or reason.startswith("OutOf") or "Allocate failed" in reason)

    @property
    def is_terminating(self) -> bool:
        """Its deletion was asked for."""
        return bool(self.metadata and self.metadata.deletion_timestamp)

    @property
    def is_admitted(self) -> bool:
        """The kubelet has taken it in, and so has given it its devices."""
        return bool(self.status and (self.status.start_time or self.status.phase not in (None, "", "Pending")))

    def containers(self) -> Iterator[tuple[Role, Container]]:
        """Every container in the order it starts: init containers first, sidecars among them."""
        for container in (self.spec and self.spec.init_containers) or ():
            yield (Role.SIDECAR if container.restart_policy == "Always" else Role.INIT), container
        for container in (self.spec and self.spec.containers) or ():
            yield Role.APP, container

    def positions(self) -> dict[str, int]:
        """Containers as gpushare and vcuda number them: from the first app container on, init containers after them."""
        ordered = sorted(self.containers(), key=lambda found: found[0] is not Role.APP)
        return {container.name: position for position, (_, container) in enumerate(ordered)}


class NodeStatus(msgspec.Struct, frozen=True):
    capacity: Amounts | None = None
    allocatable: Amounts | None = None


class NodeObject(msgspec.Struct, frozen=True, gc=False):
    metadata: Metadata | None = None
    status: NodeStatus | None = None

    @property
    def name(self) -> str:
        return (self.metadata and self.metadata.name) or ""

    @property
    def annotations(self) -> Text:
        return (self.metadata and self.metadata.annotations) or {}

    @property
    def labels(self) -> Text:
        return (self.metadata and self.metadata.labels) or {}

    @property
    def allocatable(self) -> Mapping[str, Quantity]:
        return (self.status and self.status.allocatable) or {}

    @property
    def capacity(self) -> Mapping[str, Quantity]:
        """Capacity, or allocatable where an agent filled only that."""
        return (self.status and (self.status.capacity or self.status.allocatable)) or {}


class PodRecord(msgspec.Struct, kw_only=True):
    """What a grant becomes on the wire, in the pod's own dialect."""

    annotations: dict[str, str] = msgspec.field(default_factory=dict)
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    env: dict[str, dict[str, str]] = msgspec.field(default_factory=dict)  # by container


class GrantContext(msgspec.Struct, frozen=True, kw_only=True):
    """A grant, and all that writing it in some dialect needs."""

    grant: Grant
    pod: Pod
    asked: PodRequest
    cards: tuple[Card, ...]  # of the node
    at: int  # when, in nanoseconds since 1970
    settings: DialectSettings = DEFAULTS

    def card(self, index: int) -> Card | None:
        return next((card for card in self.cards if card.index == index), None)


class NodeInventory(msgspec.Struct, frozen=True):
    """What a family's agent says of a node."""

    cards: tuple[Card, ...]
    links: tuple[tuple[int, ...], ...] = ()
    driver: str = ""
    cuda: str = ""
    one_at_a_time: bool = False
    since: str = ""  # when an agent of ours first served the node
    gpushare_unit: MiB = 0


class UnreadableValue(Exception):
    """A value that cannot be understood; caught at the doors of this room."""

    def __init__(self, code: RequestError, message: str) -> None:
        super().__init__(message)
        self.bad = BadRequest(code, message)


def shortened(text: str) -> str:
    """No more of a user's text than a person reads, and nothing that a terminal would obey."""
    cut = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
    return cut if cut.isprintable() else repr(cut)[1:-1]


def quoted(said: object) -> str:
    """The same of a value of any type, with quotes around text."""
    if not isinstance(said, str):
        return shortened(repr(said))
    return repr(said) if len(said) <= SHOWN else f"{said[:SHOWN]!r}..."


T = TypeVar("T")


def decode(decoder: msgspec.json.Decoder[T], said: object, key: str) -> T:
    """An annotation that is JSON. Whatever is wrong with it (broken, too deep, no UTF-8) is `UnreadableValue`."""
    try:
        return decoder.decode(str(said).encode())
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as wrong:
        raise UnreadableValue(
            RequestError.BAD_ANNOTATION, f"annotation `{key}` cannot be read: {_why(wrong)}"
        ) from wrong


def _why(wrong: Exception) -> str:
    """A decoder's words may repeat the value that it cannot read."""
    said = str(wrong)
    return said if len(said) <= 3 * SHOWN else f"{said[: 3 * SHOWN]}..."


def decode_or_none(decoder: msgspec.json.Decoder[T], said: object) -> T | None:
    """The same for annotations that only cost a preference when they are unreadable or absent."""
    try:
        return None if said is None else decode(decoder, said, "")
    except UnreadableValue:
        return None


def convert_pod(obj: Any) -> Pod | BadRequest:
    """A pod as JSON, as our `Pod`. Any JSON value may come in."""
    try:
        return msgspec.convert(obj, Pod)
    except msgspec.ValidationError as wrong:
        return BadRequest(
            RequestError.MALFORMED, f"this is no pod: {_why(wrong)}; write it as `kubectl explain pod` shows"
        )


def convert_node(obj: Any) -> NodeObject | BadRequest:
    """A node as JSON, as our `NodeObject`. Any JSON value may come in."""
    try:
        return msgspec.convert(obj, NodeObject)
    except msgspec.ValidationError as wrong:
        return BadRequest(
            RequestError.MALFORMED, f"this is no node: {_why(wrong)}; write it as `kubectl explain node` shows"
        )


# ---- numbers and lists ------------------------------------------------------------------------------------------


def written(container: Container, resource: str) -> Quantity:
    """What the container says of a resource: its limit, else its request."""
    found = container.resources or Resources()
    limits, requests = found.limits or {}, found.requests or {}
    return limits[resource] if resource in limits else requests.get(resource)


def amount(container: Container, resource: str) -> int:
    """How much of a resource the container asks for; 0 when it does not."""
    said = written(container, resource)
    return 0 if said is None else _whole(said, f"`{resource}` of container `{container.shown}`")


def _whole(said: Quantity, where: str) -> int:
    value = quantity(said)
    if value is None or value.denominator != 1:
        raise UnreadableValue(RequestError.NOT_A_NUMBER, f"{where} is {quoted(said)}; write a whole number")
    number = value.numerator
    if number < 0:
        raise UnreadableValue(RequestError.NEGATIVE, f"{where} is {shortened(str(said))}; write 0 or more")
    if number >= 2**31:
        raise UnreadableValue(
            RequestError.OUT_OF_RANGE,
            f"{where} is {shortened(str(said))}, more than any node has; the number has a unit of its own, write no Gi "
            "or Mi",
        )
    return number


def card_memory(container: Container, resource: str, unit: MiB, split: int = 1) -> MiB:
    """Memory per card in MiB, of a resource counted in `unit` MiB and split over cards; at most the largest card."""
    units = amount(container, resource) // split
    if units * unit > LARGEST_CARD:
        raise UnreadableValue(
            RequestError.OUT_OF_RANGE,
            f"`{resource}` of container `{container.shown}` is {units} per card, and one unit is {unit} MiB: no "
            f"card has that much memory; write at most what `kubectl describe node` shows for one card",
        )
    return units * unit


def names(said: object) -> tuple[str, ...]:
    """A comma list without blanks and empty entries."""
    return () if said is None else tuple(part.strip() for part in str(said).split(",") if part.strip())


def listed(annotations: Text, key: str) -> tuple[str, ...]:
    """The comma list under a key of a pod. Commas are counted first: a list of 45,000 entries is not even split."""
    said = annotations.get(key)
    if isinstance(said, str) and said.count(",") >= LONGEST_LIST:
        raise UnreadableValue(
            RequestError.BAD_ANNOTATION,
            f"annotation `{key}` lists {said.count(',') + 1} entries; write at most {LONGEST_LIST}",
        )
    return names(said)


def one_of(annotations: Text, key: str, allowed: Mapping[str, Any]) -> Any:
    """The meaning of an annotation that must be one of a few words; None when it is absent or empty."""
    said = str(annotations.get(key) or "").strip().lower()
    if not said:
        return None
    if said not in allowed:
        code = RequestError.UNKNOWN_POLICY if "policy" in key else RequestError.BAD_ANNOTATION
        raise UnreadableValue(code, f"annotation `{key}` is {quoted(said)}; write one of {', '.join(sorted(allowed))}")
    return allowed[said]


def flag(annotations: Text, key: str) -> bool:
    """A yes-or-no annotation as Go's ParseBool reads it."""
    yes_no = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}
    return bool(one_of(annotations, key, yes_no))


def no_device(container: Container, has: str, carrier: str, line: str) -> UnreadableValue:
    """The refusal of a container that names a share but not the resource the kubelet hands devices out for."""
    return UnreadableValue(
        RequestError.NO_DEVICE_RESOURCE,
        f"container `{container.shown}` asks for `{has}` without `{carrier}`, and only that brings a card; add "
        f"`{line}` to its limits",
    )


# ---- from containers to a request, from a grant to the wire -------------------------------------------------------


def request(
    dialect: str,
    pod: Pod,
    asks: tuple[ContainerRequest, ...],
    constraints: Constraints | None = None,
    *,
    together: bool = False,
    block: MiB = 1,
    warnings: list[str] | None = None,
) -> PodRequest | None:
    """A request out of its parts, with the pod's CPU and memory; None when no container wants a card."""
    if not any(ask.cards for ask in asks):
        return None
    names_used = [ask.container for ask in asks]
    if not all(names_used) or len(set(names_used)) != len(names_used):
        raise UnreadableValue(
            RequestError.MALFORMED, "two containers share a name, or one has none; give each container its own"
        )
    cpu, memory = host_needs(pod)
    return PodRequest(
        dialect=dialect,
        asks=asks,
        together=together,
        constraints=constraints or Constraints(),
        cpu=cpu,
        memory=memory,
        block=block,
        warnings=tuple(warnings or ()),
    )


def host_needs(pod: Pod) -> tuple[Millicores, MiB]:
    """The CPU and main memory that kube-scheduler counts for the pod."""
    most = most_at_once(((role, _host_share(container)) for role, container in pod.containers()), 2)
    overhead = (pod.spec and pod.spec.overhead) or {}
    extra = (millicores(overhead.get("cpu")) or 0, host_mebibytes(overhead.get("memory")) or 0)
    return (
        _countable(most[0] + max(0, extra[0])),
        _countable(most[1] + max(0, extra[1])),
    )


def _host_share(container: Container) -> tuple[Millicores, MiB]:
    cpu, memory = millicores(_requested(container, "cpu")), host_mebibytes(_requested(container, "memory"))
    return max(0, cpu or 0), max(0, memory or 0)


def _countable(amount: int) -> int:
    """No node has that much; a number that arrays can bear."""
    return min(amount, 2**48)


def _requested(container: Container, resource: str) -> Quantity:
    found = container.resources or Resources()
    requests, limits = found.requests or {}, found.limits or {}
    return requests[resource] if resource in requests else limits.get(resource)


def visible_devices(held: ContainerGrant) -> dict[str, str]:
    """What every family's containers see: the UUIDs of their cards."""
    return {"NVIDIA_VISIBLE_DEVICES": ",".join(tile.uuid for tile in held.tiles)}


def recorded(
    pod: Pod, dialect: str, cards: tuple[Card, ...], asks: Iterable[tuple[ContainerRequest, tuple[int, ...]]]
) -> Grant | None:
    """A grant out of card indices per container, for the families that record no amounts; `asks` has those that the
    record names. None when it names none, or a card that the node lacks."""
    by_index = {card.index: card for card in cards}
    containers = []
    for ask, indices in asks:
        chosen = [by_index.get(index) for index in indices]
        tiles = tuple(take(ask, card) for card in chosen if card is not None)
        if len(tiles) != len(indices):
            return None
        if tiles:
            containers.append(ContainerGrant(ask.container, tiles, ask.role))
    if not containers:
        return None
    return Grant(pod=pod.uid, node=pod.node_name, dialect=dialect, containers=tuple(containers))


def first_readable(reads: Iterable[Callable[[], ContainerRequest]], otherwise: ContainerRequest) -> ContainerRequest:
    """What a running container was given. Its request may be one that we would reject: then `otherwise`."""
    for read in reads:
        try:
            ask = read()
        except UnreadableValue:
            continue
        if ask.cards:
            return ask
    return otherwise


def amount_or_none(container: Container, resource: str) -> int | None:
    """The same as `amount`, and None where it cannot be read."""
    try:
        return amount(container, resource)
    except UnreadableValue:
        return None


def requests_any(container: Container, names: frozenset[str]) -> bool:
    """Whether the container requests any amount of one of these resources."""
    return any(written(container, name) not in (0, "0", None) for name in names)


def is_for_another_node(pod: Pod, key: str) -> bool:
    """Whether the record was written for another node than the pod's: then it was copied, or is stale."""
    said = str(pod.annotations.get(key) or "")
    return bool(said) and said != pod.node_name


def indices_of(said: object) -> tuple[int, ...]:
    """`"0,2"` as numbers; whatever is no index is left out, so that the count will not match."""
    return tuple(int(part) for part in names(said) if part.isascii() and part.isdecimal() and len(part) < 6)


def number(text: str, what: str) -> int:
    """A number in a record of somebody else's; nine digits are enough for any card."""
    if not (text.isascii() and text.isdecimal()) or len(text) > 9:
        raise UnreadableValue(RequestError.BAD_ANNOTATION, f"{what} has {text[:20]!r} where a number should be")
    return int(text)


def count_of(amounts: Mapping[str, Quantity], resource: str) -> int:
    """A node's amount of a resource, 0 when absent or unreadable."""
    value = quantity(amounts.get(resource))
    return int(value) if value is not None and 0 <= value < 2**40 else 0


def unnamed_cards(node: NodeObject, count: int, memory: MiB, **facts: Any) -> tuple[Card, ...]:
    """Cards of which only number and average size are known."""
    return tuple(
        Card(index=index, uuid=unnamed(node.name, index), memory=memory, **facts) for index in range(min(count, 1024))
    )


def unnamed(node: str, index: int) -> str:
    """The UUID that we make up for a card whose own is not known."""
    return f"{node}#{index}"
