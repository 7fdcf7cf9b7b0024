"""The wire format of the extender API: keys, nulls and node forms, and malformed bodies."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from gputile.scheduler.extender_api import (
    BadBody,
    BindArgs,
    FilterAnswer,
    FilterArgs,
    OfferedVictims,
    read_bind,
    read_filter,
    read_preempt,
    write_bind,
    write_filter,
    write_preempt,
    write_prioritize,
)
from gputile.testing.builders import node, pod

POD = pod({"gputile.io/gpu": 1})
NODES = [node("node-a").card().manifest(), node("node-b").manifest()]


def body(**sent: Any) -> bytes:
    return json.dumps(sent).encode()


# ---- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(body(Pod=POD, Nodes=None, NodeNames=["node-a", "node-b"]), id="as-kube-scheduler-writes-it"),
        pytest.param(body(pod=POD, nodes=None, nodenames=["node-a", "node-b"]), id="in-lower-case-as-before-1.17"),
        pytest.param(body(POD=POD, nodeNames=["node-a", "node-b"]), id="in-any-case-and-without-the-nulls"),
        pytest.param(body(Pod=POD, NodeNames=["node-a", "node-b"], Later={"is": "more"}), id="with-unknown-keys"),
        pytest.param(
            body(Pod=POD, NodeNames=["node-a", "node-b"], Nodes={"items": [{}]}), id="names-win-when-both-come"
        ),
    ],
)
def test_names(sent: bytes) -> None:
    args = read_filter(sent)
    assert (args.pod.name, args.names, args.node_objects) == ("web-0", ["node-a", "node-b"], None)


@pytest.mark.parametrize("key", ["Nodes", "nodes", "NODES"])
def test_node_objects(key: str) -> None:
    args = read_filter(body(Pod=POD, NodeNames=None, **{key: {"metadata": {}, "items": NODES}}))
    assert args.names == ["node-a", "node-b"]
    assert args.node_objects is not None
    assert [json.loads(bytes(args.node_objects[name])) for name in args.names] == NODES
    assert (sent := args.node("node-a")) is not None
    assert sent.name == "node-a"
    assert args.node("node-c") is None


def test_no_nodes_at_all_are_an_empty_list() -> None:
    """Go encodes an empty slice as null."""
    assert read_filter(body(Pod=POD, NodeNames=None, Nodes={"metadata": {}, "items": None})).names == []
    assert read_filter(body(Pod=POD, NodeNames=[])).names == []


def test_an_undecodable_node_is_none_and_is_still_sent_back() -> None:
    odd = {"metadata": {"name": "node-a", "annotations": 7}}
    args = read_filter(body(Pod=POD, Nodes={"items": [odd]}))
    assert args.node("node-a") is None
    assert json.loads(write_filter(FilterAnswer(names=["node-a"]), args))["Nodes"]["items"] == [odd]


def test_bind() -> None:
    args = BindArgs(namespace="ml", name="web-0", uid="6a9c", node="node-a")
    assert read_bind(body(PodName="web-0", PodNamespace="ml", PodUID="6a9c", Node="node-a")) == args
    assert read_bind(body(podname="web-0", podNamespace="ml", poduid="6a9c", node="node-a")) == args
    assert args.key == "ml/web-0"


def test_a_bind_without_uid_and_namespace_means_the_default_namespace_and_any_uid() -> None:
    args = read_bind(body(PodName="web-0", PodUID=None, Node="node-a"))
    assert (args.namespace, args.uid) == ("default", "")


@pytest.mark.parametrize(
    ("sent", "offers"),
    [
        pytest.param(
            {
                "NodeNameToVictims": None,
                "NodeNameToMetaVictims": {"a": {"Pods": [{"UID": "1"}], "NumPDBViolations": 2}},
            },
            {"a": OfferedVictims(("1",), 2)},
            id="meta-victims",
        ),
        pytest.param(
            {"NodeNameToVictims": {"a": {"Pods": [pod(uid="1"), pod(uid="2")], "NumPDBViolations": 0}}},
            {"a": OfferedVictims(("1", "2"))},
            id="victims-as-pod-objects",
        ),
        pytest.param(
            {"nodenametometavictims": {"a": {"pods": [{"uid": "1"}], "numPDBViolations": 1}}},
            {"a": OfferedVictims(("1",), 1)},
            id="keys-in-any-case",
        ),
        pytest.param(
            {"NodeNameToMetaVictims": {"a": {"Pods": None}}}, {"a": OfferedVictims(())}, id="null-for-no-pods"
        ),
        pytest.param({"NodeNameToMetaVictims": {"a": None}}, {"a": OfferedVictims(())}, id="null-for-a-node"),
        pytest.param(
            {"NodeNameToMetaVictims": {"a": {"Pods": [7]}}}, {"a": OfferedVictims(("",))}, id="a-victim-without-a-uid"
        ),
        pytest.param({}, {}, id="no-node-at-all"),
    ],
)
def test_preempt(sent: dict[str, Any], offers: dict[str, OfferedVictims]) -> None:
    assert read_preempt(body(Pod=POD, **sent)).offers == offers


# ---- malformed bodies -----------------------------------------------------------------------------------------------

DEEP = 100_000
GOOD = body(Pod=POD, NodeNames=["node-a"])

ANY = [
    pytest.param(b"", id="nothing"),
    pytest.param(b"hello", id="words"),
    pytest.param(b"null", id="null"),
    pytest.param(b"7", id="a-number"),
    pytest.param(b"[]", id="a-list"),
    pytest.param(b'"Pod"', id="a-string"),
    pytest.param(GOOD[:-1], id="cut-short"),
    pytest.param(GOOD + b"}", id="too-long"),
    pytest.param(b"\xef\xbb\xbf" + GOOD, id="with-a-byte-order-mark"),
    pytest.param(b"\xff\xfe" + GOOD, id="no-utf-8"),
    pytest.param(GOOD.replace(b'"Pod"', b'"P\xc3"'), id="a-key-with-half-a-character"),
    pytest.param(GOOD.replace(b"web-0", b"web-\xc3"), id="a-string-with-half-a-character"),
    pytest.param(GOOD.replace(b"web-0", b"\xed\xa0\x80"), id="a-surrogate-in-utf-8"),
    pytest.param(GOOD.replace(b"web-0", b"\\ud800"), id="half-a-surrogate-pair"),
    pytest.param(GOOD.replace(b"web-0", b"\\udc00"), id="the-other-half"),
    pytest.param(b"[" * DEEP, id="open-brackets"),
    pytest.param(b'{"a":' * DEEP, id="open-braces"),
    pytest.param(b'{"Pod":' + b"[" * DEEP + b"]" * DEEP + b"}", id="a-deep-pod"),
    pytest.param(b'{"Pod":{"spec":' + b'{"x":' * DEEP + b"1" + b"}" * DEEP + b"}}", id="deep-in-an-unknown-field"),
    pytest.param(b'{"Pod":{"metadata":{"name":NaN}},"NodeNames":[]}', id="not-a-number"),
    pytest.param(b'{"Pod":Infinity,"NodeNames":[]}', id="infinity"),
    pytest.param(b"{'Pod':{}}", id="single-quotes"),
    pytest.param(b"{,}", id="a-comma"),
    pytest.param(b'{"Pod":{}', id="an-open-object"),
    pytest.param(GOOD.replace(b"null", b"nul"), id="a-misspelt-null"),
    pytest.param(b"\x00" * 100, id="zero-bytes"),
]

WITH_POD = [
    pytest.param(body(NodeNames=["node-a"]), id="no-pod"),
    pytest.param(body(Pod=None, NodeNames=["node-a"]), id="a-null-pod"),
    pytest.param(body(Pod=[], NodeNames=["node-a"]), id="a-list-as-pod"),
    pytest.param(body(Pod="web-0", NodeNames=["node-a"]), id="a-name-as-pod"),
    pytest.param(body(Pod={"spec": []}, NodeNames=["node-a"]), id="a-list-as-spec"),
    pytest.param(body(Pod={"metadata": {"uid": 7}}, NodeNames=["node-a"]), id="a-number-as-uid"),
    pytest.param(body(Pod={"spec": {"containers": {}}}, NodeNames=["node-a"]), id="containers-as-a-map"),
    pytest.param(
        b'{"Pod":{"spec":{"priority":1' + b"0" * 400 + b'}},"NodeNames":[]}', id="a-number-of-four-hundred-digits"
    ),
    pytest.param(b'{"Pod":{"spec":{"priority":1e999}},"NodeNames":[]}', id="a-number-beyond-infinity"),
]


@pytest.mark.parametrize("read", [read_filter, read_bind, read_preempt])
@pytest.mark.parametrize("sent", ANY)
def test_a_body_that_is_not_a_json_object_is_rejected(read: Callable[[bytes], object], sent: bytes) -> None:
    with pytest.raises(
        BadBody, match=r"not a JSON object|`Pod` is invalid|`PodName` or `Node` is missing|arg or pod is nil"
    ):
        read(sent)


@pytest.mark.parametrize("read", [read_filter, read_preempt])
@pytest.mark.parametrize("sent", WITH_POD)
def test_a_body_without_a_valid_pod_is_rejected(read: Callable[[bytes], object], sent: bytes) -> None:
    with pytest.raises(BadBody, match=r"arg or pod is nil|`Pod` is invalid"):
        read(sent)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        pytest.param(body(Pod=POD), "cannot get node names", id="neither-names-nor-nodes"),
        pytest.param(body(Pod=POD, NodeNames=None, Nodes=None), "cannot get node names", id="two-nulls"),
        pytest.param(body(Pod=POD, NodeNames=[1, 2]), "`NodeNames` is invalid", id="names-that-are-numbers"),
        pytest.param(body(Pod=POD, NodeNames=[None]), "`NodeNames` is invalid", id="names-that-are-null"),
        pytest.param(body(Pod=POD, NodeNames="node-a"), "`NodeNames` is invalid", id="one-name-and-no-list"),
        pytest.param(body(Pod=POD, NodeNames={"a": 1}), "`NodeNames` is invalid", id="a-map-of-names"),
        pytest.param(body(Pod=POD, Nodes=["node-a"]), "`Nodes` is invalid", id="a-list-as-nodes"),
        pytest.param(body(Pod=POD, Nodes={"items": {}}), "`Nodes` is invalid", id="items-that-are-a-map"),
        pytest.param(body(Pod=POD, Nodes={"items": [7]}), "not a node with a name", id="a-node-that-is-a-number"),
        pytest.param(body(Pod=POD, Nodes={"items": [None]}), "not a node with a name", id="a-node-that-is-null"),
        pytest.param(
            body(Pod=POD, Nodes={"items": [{"metadata": {}}]}), "not a node with a name", id="a-nameless-node"
        ),
        pytest.param(
            body(Pod=POD, Nodes={"items": [{"metadata": {"name": 5}}]}), "not a node with a name", id="a-node-named-5"
        ),
    ],
)
def test_a_body_without_valid_nodes_is_rejected(sent: bytes, why: str) -> None:
    with pytest.raises(BadBody, match=why):
        read_filter(sent)


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"PodName": "web-0"}, id="no-node"),
        pytest.param({"Node": "node-a"}, id="no-pod"),
        pytest.param({"PodName": "", "Node": "node-a"}, id="an-empty-name"),
        pytest.param({"PodName": "web-0", "Node": None}, id="a-null-node"),
        pytest.param({"PodName": 7, "Node": "node-a"}, id="a-number-as-name"),
        pytest.param({"PodName": "web-0", "Node": ["node-a"]}, id="a-list-as-node"),
        pytest.param({"PodName": "web-0", "Node": "node-a", "PodUID": {}}, id="a-map-as-uid"),
    ],
)
def test_an_incomplete_bind_is_rejected(sent: dict[str, Any]) -> None:
    with pytest.raises(BadBody, match=r"`PodName` or `Node` is missing|is invalid"):
        read_bind(body(**sent))


@pytest.mark.parametrize(
    "victims",
    [
        pytest.param(["a"], id="a-list"),
        pytest.param("a", id="a-string"),
        pytest.param({"a": {"Pods": {"UID": "1"}}}, id="pods-that-are-a-map"),
        pytest.param({"a": {"Pods": [], "NumPDBViolations": "2"}}, id="violations-as-a-string"),
        pytest.param({"a": {"Pods": [], "NumPDBViolations": 1.5}}, id="one-and-a-half-violations"),
    ],
)
def test_invalid_victims_are_rejected(victims: Any) -> None:
    with pytest.raises(BadBody, match="NodeNameToMetaVictims"):
        read_preempt(body(Pod=POD, NodeNameToMetaVictims=victims))


def test_more_violations_than_64_bits_hold() -> None:
    try:
        args = read_preempt(body(Pod=POD, NodeNameToMetaVictims={"a": {"Pods": [], "NumPDBViolations": 2**64}}))
    except BadBody:
        return
    write_preempt(args.offers)


BAD_LABEL = b'{"metadata":{"name":"node-a","labels":{"a":"\xff"}}}'


def test_a_node_object_that_is_not_utf_8_is_undecodable() -> None:
    sent = b'{"Pod":%s,"Nodes":{"items":[%s]}}' % (json.dumps(POD).encode(), BAD_LABEL)
    try:
        args = read_filter(sent)
    except BadBody:
        return
    assert args.node("node-a") is None


def test_what_is_sent_back_is_json() -> None:
    sent = b'{"Pod":%s,"Nodes":{"items":[%s]}}' % (json.dumps(POD).encode(), BAD_LABEL)
    try:
        args = read_filter(sent)
    except BadBody:
        return
    json.loads(write_filter(FilterAnswer(names=args.names), args))


@pytest.mark.parametrize("sent", [body(NodeNames=["node-a"]), body(Pod=None, NodeNames=["node-a"])])
def test_a_missing_pod_is_rejected_with_gpushares_text(sent: bytes) -> None:
    with pytest.raises(BadBody, match="arg or pod is nil"):
        read_filter(sent)


# ---- writing --------------------------------------------------------------------------------------------------------


def names(*args: str) -> FilterArgs:
    return read_filter(body(Pod=POD, NodeNames=list(args)))


@pytest.mark.parametrize(
    ("written", "want"),
    [
        pytest.param(
            write_filter(
                FilterAnswer(names=["node-a"], failed={"node-b": "Insufficient GPU Memory in one device"}),
                names("node-a", "node-b"),
            ),
            b'{"Nodes":null,"NodeNames":["node-a"],"FailedNodes":{"node-b":"Insufficient GPU Memory in one device"},'
            b'"FailedAndUnresolvableNodes":{},"Error":""}',
            id="filter-names",
        ),
        pytest.param(
            write_filter(FilterAnswer(unresolvable={"node-a": "no GPU"}), names("node-a")),
            b'{"Nodes":null,"NodeNames":[],"FailedNodes":{},'
            b'"FailedAndUnresolvableNodes":{"node-a":"no GPU"},"Error":""}',
            id="filter-without-a-feasible-node",
        ),
        pytest.param(
            write_filter(FilterAnswer(error="no"), None),
            b'{"Nodes":null,"NodeNames":null,"FailedNodes":{},"FailedAndUnresolvableNodes":{},"Error":"no"}',
            id="filter-that-failed",
        ),
        pytest.param(write_prioritize({"node-a": 7}), b'[{"Host":"node-a","Score":7}]', id="prioritize-a-bare-list"),
        pytest.param(write_prioritize({}), b"[]", id="prioritize-no-node"),
        pytest.param(write_bind(""), b'{"Error":""}', id="bound"),
        pytest.param(write_bind("no"), b'{"Error":"no"}', id="not-bound"),
        pytest.param(
            write_preempt({"node-a": OfferedVictims(("6a9c",), 0)}),
            b'{"NodeNameToMetaVictims":{"node-a":{"Pods":[{"UID":"6a9c"}],"NumPDBViolations":0}}}',
            id="preempt-in-the-meta-form",
        ),
    ],
)
def test_responses_byte_for_byte(written: bytes, want: bytes) -> None:
    assert written == want


def test_node_objects_are_sent_back_unchanged_byte_for_byte() -> None:
    strange = b'{ "metadata":{"name":"node-a","x":1.50, "y":"\\u003c"},"kind":"Node" }'
    args = read_filter(b'{"Pod":%s,"Nodes":{"items":[%s]},"NodeNames":null}' % (json.dumps(POD).encode(), strange))
    reply = write_filter(FilterAnswer(names=["node-a"]), args)
    assert reply.startswith(b'{"Nodes":{"metadata":{},"items":[' + strange + b']},"NodeNames":null,"FailedNodes":{}')


def test_only_feasible_nodes_are_sent_back() -> None:
    args = read_filter(body(Pod=POD, Nodes={"items": NODES}))
    reply = json.loads(write_filter(FilterAnswer(names=["node-b"], failed={"node-a": "no"}), args))
    assert reply["Nodes"] == {"metadata": {}, "items": [NODES[1]]}
    assert (reply["NodeNames"], reply["FailedNodes"]) == (None, {"node-a": "no"})
