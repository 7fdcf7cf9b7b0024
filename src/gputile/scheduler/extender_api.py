"""The wire format of kube-scheduler's extender API: decodes requests and encodes responses. No decision is made here.

Keys are read in any case (old clients write `pod`, `nodenames`, `nodeNames`) and written as Kubernetes writes them.
Node objects (`nodeCacheCapable: false`) are kept as the bytes that were received, because they are only sent back.
"""

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
import orjson

from gputile.dialects.kube_objects import NodeObject, Pod
from gputile.model.decode_errors import decode_problem

T = TypeVar("T")


class BadBody(Exception):
    """A request body that the verb cannot use; the text says what is wrong and what to send."""


class _NodeList(msgspec.Struct):
    """A NodeList whose items are not decoded."""

    items: list[msgspec.Raw] | None = None


class _NodeMetadata(msgspec.Struct):
    """The `metadata` of a Node, as far as its name."""

    name: str


class _NamedNode(msgspec.Struct):
    """A Node of which only the name is decoded."""

    metadata: _NodeMetadata


_NAMED_NODE = msgspec.json.Decoder(_NamedNode)
_NODE = msgspec.json.Decoder(NodeObject)
_POD = msgspec.json.Decoder(Pod)
_KEYS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NAMES = msgspec.json.Decoder(list[str] | None)
_NODES = msgspec.json.Decoder(_NodeList | None)
_TEXT = msgspec.json.Decoder(str | None)
_UNDECODABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


class FilterArgs(msgspec.Struct, frozen=True, kw_only=True):
    """ExtenderArgs of filter and prioritize: the pod and its candidate nodes, as names or as objects."""

    pod: Pod
    names: list[str]
    node_objects: dict[str, msgspec.Raw] | None = None  # None: kube-scheduler sent names

    def node(self, name: str) -> NodeObject | None:
        """The node as it was sent; None if only its name was sent, or if the object is undecodable."""
        try:
            raw = self.node_objects.get(name) if self.node_objects is not None else None
            return None if raw is None else _NODE.decode(raw)
        except (msgspec.DecodeError, RecursionError):
            return None


class BindArgs(msgspec.Struct, frozen=True, kw_only=True):
    """ExtenderBindingArgs: which pod to bind to which node."""

    namespace: str
    name: str
    uid: str
    node: str

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"


class OfferedVictims(msgspec.Struct, frozen=True):
    """The pods that kube-scheduler would evict from one node."""

    pods: tuple[str, ...]  # UIDs
    violations: int = 0  # of PodDisruptionBudgets


class PreemptArgs(msgspec.Struct, frozen=True, kw_only=True):
    """ExtenderPreemptionArgs: the preemptor, and the victims that kube-scheduler offers per node."""

    pod: Pod
    offers: dict[str, OfferedVictims]


class FilterAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """ExtenderFilterResult: the nodes that fit, and why the others do not; an error fails the scheduling attempt."""

    names: list[str] = msgspec.field(default_factory=list)
    failed: dict[str, str] = msgspec.field(default_factory=dict)
    unresolvable: dict[str, str] = msgspec.field(default_factory=dict)
    error: str = ""
    encoded: bytes = b""  # the output of `write_filter`, where the answer was encoded before


# ---- reading --------------------------------------------------------------------------------------------------------


def read_filter(body: bytes, every: Iterable[str] | None = None) -> FilterArgs:
    """`every`: the candidate nodes of a body without nodes; if None, such a body is an error."""
    keys = _keys(body)
    pod = _read_pod(keys)
    names = _decode(_NAMES, keys, "nodenames", "NodeNames")
    if names is not None:
        return FilterArgs(pod=pod, names=names)
    nodes = _decode(_NODES, keys, "nodes", "Nodes")
    if nodes is None and every is not None:
        return FilterArgs(pod=pod, names=sorted(every))
    if nodes is None:
        raise BadBody("cannot get node names; send NodeNames (nodeCacheCapable: true) or Nodes with items")
    node_objects = _by_name(nodes.items or [])
    return FilterArgs(pod=pod, names=list(node_objects), node_objects=node_objects)


def read_bind(body: bytes) -> BindArgs:
    keys = _keys(body)
    name, namespace, uid, node = (
        _decode(_TEXT, keys, key.lower(), key) or "" for key in ("PodName", "PodNamespace", "PodUID", "Node")
    )
    if not name or not node:
        raise BadBody("`PodName` or `Node` is missing; send PodName, PodNamespace, PodUID and Node")
    return BindArgs(namespace=namespace or "default", name=name, uid=uid, node=node)


def read_preempt(body: bytes) -> PreemptArgs:
    keys = _keys(body)
    pod = _read_pod(keys)
    for key in ("NodeNameToMetaVictims", "NodeNameToVictims"):
        raw = keys.get(key.lower())
        victims_by_node = None if raw is None else _loads(raw, key)
        if victims_by_node is not None:
            return PreemptArgs(pod=pod, offers=_offers(victims_by_node, key))
    return PreemptArgs(pod=pod, offers={})


def _keys(body: bytes) -> dict[str, msgspec.Raw]:
    try:
        if not body.isascii():
            body.decode()  # parts of the body are sent back unchanged, so all of it must be valid UTF-8
        return {key.lower(): raw for key, raw in _KEYS.decode(body).items()}
    except _UNDECODABLE as error:
        raise BadBody(
            f"the body is not a JSON object: {decode_problem(error)}; send what kube-scheduler sends"
        ) from error


def _decode(decoder: msgspec.json.Decoder[T], keys: dict[str, msgspec.Raw], key: str, shown: str) -> T | None:
    raw = keys.get(key)
    if raw is None:
        return None
    try:
        return decoder.decode(raw)
    except _UNDECODABLE as error:
        raise BadBody(f"`{shown}` is invalid: {decode_problem(error)}") from error


def _read_pod(keys: dict[str, msgspec.Raw]) -> Pod:
    raw = keys.get("pod")
    if raw is None or bytes(raw) == b"null":
        raise BadBody("arg or pod is nil; send the pod under the key Pod")
    pod = _decode(_POD, keys, "pod", "Pod")
    assert pod is not None
    return pod


def _by_name(items: list[msgspec.Raw]) -> dict[str, msgspec.Raw]:
    try:
        return {_NAMED_NODE.decode(raw).metadata.name: raw for raw in items}
    except _UNDECODABLE as error:
        raise BadBody(f"`Nodes` has an item that is not a node with a name: {decode_problem(error)}") from error


def _loads(raw: msgspec.Raw, key: str) -> Any:
    try:
        return msgspec.json.decode(raw)
    except _UNDECODABLE as error:
        raise BadBody(f"`{key}` is invalid: {decode_problem(error)}") from error


def _offers(victims_by_node: Any, key: str) -> dict[str, OfferedVictims]:
    if not isinstance(victims_by_node, dict):
        raise BadBody(f"`{key}` must map node names to victims")
    return {str(node): _offer(victims, key) for node, victims in victims_by_node.items()}


def _offer(victims: Any, key: str) -> OfferedVictims:
    values = _lowercase_keys(victims)
    pods, violations = values.get("pods") or [], values.get("numpdbviolations") or 0
    if not isinstance(pods, list) or not isinstance(violations, int) or abs(violations) >= 2**31:
        raise BadBody(f"`{key}` has invalid victims; send a list `Pods` and a number `NumPDBViolations`")
    return OfferedVictims(tuple(_uid(pod) for pod in pods), violations)


def _uid(pod: Any) -> str:
    """The UID of a MetaPod (`UID`) or of a Pod object (`metadata.uid`)."""
    values = _lowercase_keys(pod)
    return str(values.get("uid") or _lowercase_keys(values.get("metadata")).get("uid") or "")


def _lowercase_keys(value: Any) -> dict[str, Any]:
    return {str(key).lower(): item for key, item in value.items()} if isinstance(value, dict) else {}


# ---- writing --------------------------------------------------------------------------------------------------------


def write_filter(answer: FilterAnswer, args: FilterArgs | None) -> bytes:
    """In the form of the request: node names for names, node objects for objects."""
    if answer.encoded:
        return answer.encoded
    reply: dict[str, Any] = {"Nodes": None, "NodeNames": None}
    if args is not None and args.node_objects is not None:
        items = [orjson.Fragment(bytes(args.node_objects[name])) for name in answer.names]
        reply["Nodes"] = {"metadata": {}, "items": items}
    elif args is not None:
        reply["NodeNames"] = answer.names
    reply |= {
        "FailedNodes": answer.failed,
        "FailedAndUnresolvableNodes": answer.unresolvable,
        "Error": answer.error,
    }
    return orjson.dumps(reply)


def write_prioritize(scores: dict[str, int]) -> bytes:
    return orjson.dumps([{"Host": host, "Score": score} for host, score in scores.items()])


def write_bind(error: str) -> bytes:
    return orjson.dumps({"Error": error})


def write_preempt(offers: dict[str, OfferedVictims]) -> bytes:
    return orjson.dumps(
        {
            "NodeNameToMetaVictims": {
                node: {"Pods": [{"UID": uid} for uid in offer.pods], "NumPDBViolations": offer.violations}
                for node, offer in offers.items()
            }
        }
    )
