"""What kube-scheduler sends to an extender, and what it wants to hear.

Keys are read whatever their case (old clients write `pod`, `nodenames`, `nodeNames`) and written as Kubernetes writes
them. Whole nodes (`nodeCacheCapable: false`) are kept as the bytes they came in, for they are only handed back.
"""

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
import orjson

from gputile.dialects.kube_objects import NodeObject, Pod

T = TypeVar("T")


class BadBody(Exception):
    """A body that is not what the verb takes; the text says what is wrong and what to send."""


class _Nodes(msgspec.Struct):
    items: list[msgspec.Raw] | None = None


class _Name(msgspec.Struct):
    name: str


class _Named(msgspec.Struct):
    metadata: _Name


_NAME = msgspec.json.Decoder(_Named)
_NODE = msgspec.json.Decoder(NodeObject)
_POD = msgspec.json.Decoder(Pod)
_KEYS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NAMES = msgspec.json.Decoder(list[str] | None)
_NODES = msgspec.json.Decoder(_Nodes | None)
_TEXT = msgspec.json.Decoder(str | None)


class FilterArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Of filter and prioritize: the pod, and the nodes it may go to, by name or whole."""

    pod: Pod
    names: list[str]
    whole: dict[str, msgspec.Raw] | None = None  # None: kube-scheduler sent names

    def node(self, name: str) -> NodeObject | None:
        """The node as it was sent; None if only its name was, or if it cannot be read."""
        try:
            return _NODE.decode(self.whole[name]) if self.whole is not None and name in self.whole else None
        except (msgspec.DecodeError, RecursionError):
            return None


class BindArgs(msgspec.Struct, frozen=True, kw_only=True):
    namespace: str
    name: str
    uid: str
    node: str

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"


class OfferedVictims(msgspec.Struct, frozen=True):
    """Whom kube-scheduler would evict from one node."""

    pods: tuple[str, ...]  # UIDs
    violations: int = 0


class PreemptArgs(msgspec.Struct, frozen=True, kw_only=True):
    pod: Pod
    offers: dict[str, OfferedVictims]


class FilterAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Which nodes pass, and why the others do not; an error fails the whole attempt."""

    names: list[str] = msgspec.field(default_factory=list)
    failed: dict[str, str] = msgspec.field(default_factory=dict)
    unresolvable: dict[str, str] = msgspec.field(default_factory=dict)
    error: str = ""
    written: bytes = b""  # by `write_filter`, where that was done before


# ---- reading --------------------------------------------------------------------------------------------------------


def read_filter(body: bytes, every: Iterable[str] | None = None) -> FilterArgs:
    """`every`: the nodes to take where none are named; without it that is an error, for kube-scheduler names them."""
    keys = _keys(body)
    pod = _read_pod(keys)
    names = _decode(_NAMES, keys, "nodenames", "NodeNames")
    if names is not None:
        return FilterArgs(pod=pod, names=names)
    nodes = _decode(_NODES, keys, "nodes", "Nodes")
    if nodes is None and every is not None:
        return FilterArgs(pod=pod, names=sorted(every))
    if nodes is None:
        raise BadBody("cannot get node names: send NodeNames (nodeCacheCapable: true) or Nodes with items")
    whole = _by_name(nodes.items or [])
    return FilterArgs(pod=pod, names=list(whole), whole=whole)


def read_bind(body: bytes) -> BindArgs:
    keys = _keys(body)
    name, namespace, uid, node = (
        _decode(_TEXT, keys, key.lower(), key) or "" for key in ("PodName", "PodNamespace", "PodUID", "Node")
    )
    if not name or not node:
        raise BadBody("a bind names its pod and its node: send PodName, PodNamespace, PodUID and Node")
    return BindArgs(namespace=namespace or "default", name=name, uid=uid, node=node)


def read_preempt(body: bytes) -> PreemptArgs:
    keys = _keys(body)
    pod = _read_pod(keys)
    for key in ("NodeNameToMetaVictims", "NodeNameToVictims"):
        raw = keys.get(key.lower())
        found = None if raw is None else _loads(raw, key)
        if found is not None:
            return PreemptArgs(pod=pod, offers=_offers(found, key))
    return PreemptArgs(pod=pod, offers={})


def _keys(body: bytes) -> dict[str, msgspec.Raw]:
    try:
        if not body.isascii():
            body.decode()  # parts of it are handed back as they came, so all of it must be sound
        return {key.lower(): raw for key, raw in _KEYS.decode(body).items()}
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as wrong:
        raise BadBody(f"the body is no JSON object: {wrong}; send what kube-scheduler sends") from wrong


def _decode(decoder: msgspec.json.Decoder[T], keys: dict[str, msgspec.Raw], key: str, written: str) -> T | None:
    raw = keys.get(key)
    if raw is None:
        return None
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as wrong:
        raise BadBody(f"`{written}` cannot be read: {wrong}") from wrong


def _read_pod(keys: dict[str, msgspec.Raw]) -> Pod:
    raw = keys.get("pod")
    if raw is None or bytes(raw) == b"null":
        raise BadBody("arg or pod is nil: send the pod under the key Pod")
    pod = _decode(_POD, keys, "pod", "Pod")
    assert pod is not None
    return pod


def _by_name(items: list[msgspec.Raw]) -> dict[str, msgspec.Raw]:
    try:
        return {_NAME.decode(raw).metadata.name: raw for raw in items}
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as wrong:
        raise BadBody(f"`Nodes` holds something that is no node with a name: {wrong}") from wrong


def _loads(raw: msgspec.Raw, key: str) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as wrong:
        raise BadBody(f"`{key}` cannot be read: {wrong}") from wrong


def _offers(found: Any, key: str) -> dict[str, OfferedVictims]:
    if not isinstance(found, dict):
        raise BadBody(f"`{key}` is no map from node to victims")
    return {str(node): _offer(victims, key) for node, victims in found.items()}


def _offer(victims: Any, key: str) -> OfferedVictims:
    said = _lowered(victims)
    pods, violations = said.get("pods") or [], said.get("numpdbviolations") or 0
    if not isinstance(pods, list) or not isinstance(violations, int) or abs(violations) >= 2**31:
        raise BadBody(f"`{key}` holds victims without a list of Pods and a number of violations")
    return OfferedVictims(tuple(_uid(pod) for pod in pods), violations)


def _uid(pod: Any) -> str:
    """Of a meta victim (`UID`) or of a whole pod (`metadata.uid`)."""
    said = _lowered(pod)
    return str(said.get("uid") or _lowered(said.get("metadata")).get("uid") or "")


def _lowered(found: Any) -> dict[str, Any]:
    return {str(key).lower(): value for key, value in found.items()} if isinstance(found, dict) else {}


# ---- writing --------------------------------------------------------------------------------------------------------


def write_filter(answer: FilterAnswer, args: FilterArgs | None) -> bytes:
    """In the form that was asked: names for names, whole nodes for whole nodes."""
    if answer.written:
        return answer.written
    reply: dict[str, Any] = {"Nodes": None, "NodeNames": None}
    if args is not None and args.whole is not None:
        reply["Nodes"] = {"metadata": {}, "items": [orjson.Fragment(bytes(args.whole[name])) for name in answer.names]}
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
