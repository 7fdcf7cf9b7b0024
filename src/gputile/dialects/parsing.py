"""Parsing of pods, nodes and annotations: numbers, lists and JSON out of values that anybody may have written.

Inside `dialects/` a bad value raises `UnreadableValue`. The functions of `registry` and `records` turn it into a
`BadRequest`, so the exception must not leave the package.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from gputile.dialects.kube_objects import Container, NodeObject, Pod, Resources, Text
from gputile.model import decode_errors
from gputile.model.cards import Card
from gputile.model.decode_errors import decode_problem
from gputile.model.grants import ContainerGrant, Grant, take
from gputile.model.refusals import BadRequest, RequestError
from gputile.model.requests import Constraints, ContainerRequest, PodRequest, most_at_once
from gputile.model.units import LARGEST_CARD, MiB, Millicores, Quantity, host_mebibytes, millicores, quantity

SHOWN = 60
"""Characters of a user's value that a message repeats."""

LONGEST_LIST = 256
"""Entries of a comma list: models or GPUs that a pod names. Each costs a comparison with every GPU of the cluster."""

LARGEST_NODE = 256
"""GPUs that an agent may list for one node. A table of their links is quadratic in it."""


class UnreadableValue(Exception):
    """A value that cannot be parsed; `bad` is the answer for the author of the object."""

    def __init__(self, code: RequestError, message: str) -> None:
        super().__init__(message)
        self.bad = BadRequest(code, message)


# ---- values in messages ---------------------------------------------------------------------------------------------


def shortened(text: str) -> str:
    """A user's text as messages repeat it."""
    return decode_errors.shortened(text, SHOWN)


def quoted(value: object) -> str:
    """A value of any type, cut to the same length, with quotes around text."""
    if not isinstance(value, str):
        return shortened(repr(value))
    return repr(value) if len(value) <= SHOWN else f"{value[:SHOWN]!r}..."


def container_label(container: Container) -> str:
    """The container as messages name it."""
    return f"container `{shortened(container.name)}`"


# ---- JSON -----------------------------------------------------------------------------------------------------------


T = TypeVar("T")


def decode(decoder: msgspec.json.Decoder[T], value: object, key: str) -> T:
    """An annotation that is JSON. Invalid JSON, too deep nesting and invalid UTF-8 are all `UnreadableValue`."""
    try:
        return decoder.decode(str(value).encode())
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise UnreadableValue(
            RequestError.BAD_ANNOTATION,
            f"annotation `{key}` cannot be read: {decode_problem(error)}; correct or remove it",
        ) from error


def decode_or_none(decoder: msgspec.json.Decoder[T], value: object) -> T | None:
    """The same for annotations that only express a preference: None when the value is absent or unreadable."""
    try:
        return None if value is None else decode(decoder, value, "")
    except UnreadableValue:
        return None


def convert_pod(obj: Any) -> Pod | BadRequest:
    """A pod as JSON, as our `Pod`. Any JSON value may come in."""
    try:
        return msgspec.convert(obj, Pod)
    except msgspec.ValidationError as error:
        return BadRequest(
            RequestError.MALFORMED,
            f"not a valid Pod: {decode_problem(error)}; see `kubectl explain pod` for the fields",
        )


def convert_node(obj: Any) -> NodeObject | BadRequest:
    """A node as JSON, as our `NodeObject`. Any JSON value may come in."""
    try:
        return msgspec.convert(obj, NodeObject)
    except msgspec.ValidationError as error:
        return BadRequest(
            RequestError.MALFORMED,
            f"not a valid Node: {decode_problem(error)}; see `kubectl explain node` for the fields",
        )


# ---- numbers and lists ----------------------------------------------------------------------------------------------


def resource_value(container: Container, resource: str) -> Quantity:
    """The container's amount of a resource, as written: its limit, else its request."""
    resources = container.resources or Resources()
    limits, requests = resources.limits or {}, resources.requests or {}
    return limits[resource] if resource in limits else requests.get(resource)


def amount(container: Container, resource: str) -> int:
    """How much of a resource the container requests; 0 when it requests none."""
    value = resource_value(container, resource)
    return 0 if value is None else _whole_number(value, f"{container_label(container)}: `{resource}`")


def _whole_number(value: Quantity, subject: str) -> int:
    exact = quantity(value)
    if exact is None or exact.denominator != 1:
        raise UnreadableValue(
            RequestError.NOT_A_NUMBER, f"{subject} is {quoted(value)}, not a whole number; write a whole number"
        )
    number = exact.numerator
    if number < 0:
        raise UnreadableValue(
            RequestError.NEGATIVE, f"{subject} is {shortened(str(value))}, less than 0; write 0 or more"
        )
    if number >= 2**31:
        raise UnreadableValue(
            RequestError.OUT_OF_RANGE,
            f"{subject} is {shortened(str(value))}, more than any node has; the resource has a fixed unit, so write a "
            "plain number without Gi or Mi",
        )
    return number


def card_memory(container: Container, resource: str, unit: MiB, split: int = 1) -> MiB:
    """Memory per card in MiB, of a resource counted in `unit` MiB and split over cards; at most the largest card."""
    units = amount(container, resource) // split
    if units * unit > LARGEST_CARD:
        raise UnreadableValue(
            RequestError.OUT_OF_RANGE,
            f"{container_label(container)}: `{resource}` requests {_in_units(units, unit)} per GPU, more memory than "
            "any GPU has; write at most what `kubectl describe node` shows for one GPU",
        )
    return units * unit


def _in_units(units: int, unit: MiB) -> str:
    """The amount in the unit in which the resource counts."""
    names = {1: "MiB", 1024: "GiB"}
    return f"{units} {names[unit]}" if unit in names else f"{units} x {unit} MiB"


def names(value: object) -> tuple[str, ...]:
    """A comma list without blanks and empty entries."""
    return () if value is None else tuple(part.strip() for part in str(value).split(",") if part.strip())


def listed(annotations: Text, key: str) -> tuple[str, ...]:
    """The comma list under a key of a pod. Commas are counted first: a list of 45,000 entries is not even split."""
    value = annotations.get(key)
    if isinstance(value, str) and value.count(",") >= LONGEST_LIST:
        raise UnreadableValue(
            RequestError.BAD_ANNOTATION,
            f"annotation `{key}`: it lists {value.count(',') + 1} entries; write at most {LONGEST_LIST}",
        )
    return names(value)


def one_of(annotations: Text, key: str, allowed: Mapping[str, Any]) -> Any:
    """The meaning of an annotation that must be one of a few words; None when it is absent or empty."""
    value = str(annotations.get(key) or "").strip().lower()
    if not value:
        return None
    if value not in allowed:
        code = RequestError.UNKNOWN_POLICY if "policy" in key else RequestError.BAD_ANNOTATION
        choices = ", ".join(sorted(allowed))
        raise UnreadableValue(code, f"annotation `{key}`: {quoted(value)} is not a known value; write one of {choices}")
    return allowed[value]


def flag(annotations: Text, key: str) -> bool:
    """A boolean annotation, parsed as Go's ParseBool does."""
    booleans = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}
    return bool(one_of(annotations, key, booleans))


def indices_of(value: object) -> tuple[int, ...]:
    """`"0,2"` as numbers; parts that are not an index are left out, so that the count does not match."""
    return tuple(int(part) for part in names(value) if part.isascii() and part.isdecimal() and len(part) < 6)


def parse_number(text: str, subject: str) -> int:
    """A number in another system's record; nine digits are enough for any card."""
    if not (text.isascii() and text.isdecimal()) or len(text) > 9:
        raise UnreadableValue(
            RequestError.BAD_ANNOTATION,
            f"{subject}: {text[:20]!r} is not a number; restart the agent that writes the record",
        )
    return int(text)


def count_of(amounts: Mapping[str, Quantity], resource: str) -> int:
    """A node's amount of a resource, 0 when absent or unreadable."""
    value = quantity(amounts.get(resource))
    return int(value) if value is not None and 0 <= value < 2**40 else 0


def amount_or_none(container: Container, resource: str) -> int | None:
    """The same as `amount`, and None where the amount is unreadable."""
    try:
        return amount(container, resource)
    except UnreadableValue:
        return None


def requests_any(container: Container, resources: frozenset[str]) -> bool:
    """Whether the container requests any amount of one of these resources."""
    return any(resource_value(container, resource) not in (0, "0", None) for resource in resources)


# ---- from containers to a request -----------------------------------------------------------------------------------


def missing_device_resource(container: Container, present: str, missing: str, line: str) -> UnreadableValue:
    """The rejection of a container that requests a share without the resource for which the kubelet allocates
    devices."""
    return UnreadableValue(
        RequestError.NO_DEVICE_RESOURCE,
        f"{container_label(container)}: `{present}` without `{missing}` allocates no GPU; add `{line}` to its limits",
    )


def build_request(
    dialect: str,
    pod: Pod,
    asks: tuple[ContainerRequest, ...],
    constraints: Constraints | None = None,
    *,
    together: bool = False,
    block: MiB = 1,
    warnings: list[str] | None = None,
) -> PodRequest | None:
    """A request from its parts, with the pod's CPU and memory; None when no container requests a card."""
    if not any(ask.cards for ask in asks):
        return None
    container_names = [ask.container for ask in asks]
    if not all(container_names) or len(set(container_names)) != len(container_names):
        raise UnreadableValue(
            RequestError.MALFORMED, "pod: two containers share a name, or a container has no name; name each of them"
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


def first_readable(reads: Iterable[Callable[[], ContainerRequest]], otherwise: ContainerRequest) -> ContainerRequest:
    """What a running container was given. Its request may be one that gputile would reject: then `otherwise`."""
    for read in reads:
        try:
            ask = read()
        except UnreadableValue:
            continue
        if ask.cards:
            return ask
    return otherwise


def host_needs(pod: Pod) -> tuple[Millicores, MiB]:
    """The CPU and main memory that kube-scheduler counts for the pod."""
    most = most_at_once(((role, _host_share(container)) for role, container in pod.containers()), 2)
    overhead = (pod.spec and pod.spec.overhead) or {}
    extra = (millicores(overhead.get("cpu")) or 0, host_mebibytes(overhead.get("memory")) or 0)
    return (
        _capped(most[0] + max(0, extra[0])),
        _capped(most[1] + max(0, extra[1])),
    )


def _host_share(container: Container) -> tuple[Millicores, MiB]:
    cpu, memory = millicores(_requested(container, "cpu")), host_mebibytes(_requested(container, "memory"))
    return max(0, cpu or 0), max(0, memory or 0)


def _capped(amount: int) -> int:
    """More than any node has, and small enough for 64-bit arrays."""
    return min(amount, 2**48)


def _requested(container: Container, resource: str) -> Quantity:
    resources = container.resources or Resources()
    requests, limits = resources.requests or {}, resources.limits or {}
    return requests[resource] if resource in requests else limits.get(resource)


# ---- grants, records and unnamed cards ------------------------------------------------------------------------------


def visible_devices(held: ContainerGrant) -> dict[str, str]:
    """The variable that a container of every dialect gets: the UUIDs of its cards."""
    return {"NVIDIA_VISIBLE_DEVICES": ",".join(tile.uuid for tile in held.tiles)}


def grant_from_indices(
    pod: Pod, dialect: str, cards: tuple[Card, ...], asks: Iterable[tuple[ContainerRequest, tuple[int, ...]]]
) -> Grant | None:
    """A grant from card indices per container, for dialects whose records have no amounts; `asks` has the containers
    that the record names. None when it names no container, or a card that the node lacks."""
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


def is_for_another_node(pod: Pod, key: str) -> bool:
    """Whether the record was written for another node than the pod's: then it was copied, or is stale."""
    node = str(pod.annotations.get(key) or "")
    return bool(node) and node != pod.node_name


def unnamed_cards(node: NodeObject, count: int, memory: MiB, **facts: Any) -> tuple[Card, ...]:
    """Cards of which only the number and the average size are known."""
    return tuple(
        Card(index=index, uuid=placeholder_uuid(node.name, index), memory=memory, **facts)
        for index in range(min(count, 1024))
    )


def placeholder_uuid(node: str, index: int) -> str:
    """The UUID that gputile gives to a card whose own UUID no agent publishes."""
    return f"{node}#{index}"
