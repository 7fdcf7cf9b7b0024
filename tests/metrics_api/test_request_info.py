"""Requests parsed from path, query and headers; an invalid one is an error with a reason."""

import re
from typing import Any

import pytest

from gputile.metrics_api import selectors
from gputile.metrics_api.request_info import (
    RequestInfo,
    ResponseFormat,
    read_list_options,
    read_request_info,
    read_response_format,
)
from gputile.metrics_api.selectors import BadSelector
from gputile.metrics_api.status import StatusError
from tests.metrics_api.rig import OLD_ROOT, ROOT, TABLE, ask, request

GROUP, VERSION = "metrics.nvidia.com", "v1alpha1"


@pytest.mark.parametrize(
    ("path", "want"),
    [
        pytest.param(f"{ROOT}/gpuinfos", RequestInfo(GROUP, VERSION, "gpuinfos"), id="a-list"),
        pytest.param(f"{ROOT}/gpuinfos/n1", RequestInfo(GROUP, VERSION, "gpuinfos", "", "n1"), id="one"),
        pytest.param(
            f"{ROOT}/namespaces/team-a/podresources/web",
            RequestInfo(GROUP, VERSION, "podresources", "team-a", "web"),
            id="one-of-a-namespace",
        ),
        pytest.param(f"{ROOT}/schedule/filter", RequestInfo(GROUP, VERSION, "schedule", "", "filter"), id="a-verb"),
        pytest.param(f"{ROOT}/gpuinfos/n%2F1", RequestInfo(GROUP, VERSION, "gpuinfos", "", "n/1"), id="quoted"),
        pytest.param(ROOT, None, id="a-group"),
        pytest.param("/apis//v1/pods", None, id="an-empty-part"),
        pytest.param(f"{ROOT}/gpuinfos/n1/status", None, id="a-subresource"),
        pytest.param("/api/v1/pods/x", None, id="not-below-apis"),
    ],
)
def test_request_info_of_paths(path: str, want: RequestInfo | None) -> None:
    assert read_request_info(path) == want


@pytest.mark.parametrize(
    ("path", "want"),
    [
        pytest.param("podresources", ("list", "", ""), id="all-namespaces-as-v0.1-had-it"),
        pytest.param("namespaces/a/podresources", ("list", "a", ""), id="a-namespace"),
        pytest.param("namespaces/a/podresources/web", ("get", "a", "web"), id="one"),
        pytest.param("podresources?watch=true", ("watch", "", ""), id="a-watch"),
        pytest.param("podresources?watch=1", ("watch", "", ""), id="a-watch-of-client-go"),
        pytest.param("podresources?watch=false", ("list", "", ""), id="no-watch"),
        pytest.param("gpuinfos/n1?watch=true", ("get", "", "n1"), id="one-object-is-not-watched"),
    ],
)
def test_verbs(path: str, want: tuple[str, str, str]) -> None:
    info = ask(f"{ROOT}/{path}")
    assert (info.verb, info.namespace, info.name) == want


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(f"{ROOT}/pods", id="no-such-kind"),
        pytest.param("/apis/metrics.nvidia.com/v1/gpuinfos", id="no-such-version"),
        pytest.param(f"{ROOT}/namespaces/a/gpuinfos", id="nodes-have-no-namespace"),
        pytest.param("/", id="nothing"),
    ],
)
def test_unknown_resources(path: str) -> None:
    assert read_list_options(request(path)) is None


@pytest.mark.parametrize(
    ("path", "accept", "is_old"),
    [
        pytest.param(f"{ROOT}/podresources?watch=true", "", False, id="standard-events-by-default"),
        pytest.param(f"{ROOT}/podresources?watch=true&events=v0.1", "", True, id="v0.1-when-asked"),
        pytest.param(f"{OLD_ROOT}/gpupods?watch=true", "", True, id="v0.2-by-default-in-its-group"),
        pytest.param(f"{OLD_ROOT}/gpupods?watch=true&events=standard", "", False, id="standard-when-asked"),
        pytest.param(f"{OLD_ROOT}/gpupods?watch=true", TABLE, False, id="kubectl-gets-standard-events"),
    ],
)
def test_old_events(path: str, accept: str, is_old: bool) -> None:
    assert ask(path, accept).is_old is is_old


@pytest.mark.parametrize(
    ("accept", "want"),
    [
        pytest.param("", ResponseFormat(), id="anything"),
        pytest.param("application/json", ResponseFormat(), id="json"),
        pytest.param("application/vnd.kubernetes.protobuf,application/json", ResponseFormat(), id="protobuf-preferred"),
        pytest.param(TABLE, ResponseFormat("Table", "v1"), id="a-table"),
        pytest.param(
            "application/json;as=Table;v=v1beta1;g=meta.k8s.io", ResponseFormat("Table", "v1beta1"), id="an-old-table"
        ),
        pytest.param(
            "application/json;as=Table;v=v9;g=meta.k8s.io, application/json", ResponseFormat(), id="a-future-table"
        ),
        pytest.param(
            "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1",
            ResponseFormat("PartialObjectMetadata", "v1"),
            id="metadata-only",
        ),
    ],
)
def test_accept_headers(accept: str, want: ResponseFormat) -> None:
    assert read_response_format(accept) == want


@pytest.mark.parametrize(
    ("path", "accept", "code"),
    [
        pytest.param(f"{ROOT}/gpuinfos?timeoutSeconds=soon", "", 400, id="an-invalid-timeout"),
        pytest.param(f"{ROOT}/gpuinfos?fieldSelector=spec.colour=red", "", 400, id="an-unknown-field"),
        pytest.param(f"{ROOT}/gpuinfos?labelSelector=a+b", "", 400, id="an-invalid-selector"),
        pytest.param(f"{ROOT}/gpuinfos?fieldSelector={',' * 5000}", "", 400, id="a-selector-that-is-too-long"),
        pytest.param(f"{ROOT}/gpuinfos", "application/yaml", 406, id="only-yaml"),
    ],
)
def test_invalid_requests(path: str, accept: str, code: int) -> None:
    with pytest.raises(StatusError) as no:
        ask(path, accept)
    assert no.value.code == code


# ---- selectors ------------------------------------------------------------------------------------------------------

LABELS = {"pool": "big", "tier": "", "size": "5", "huge": "9" * 19}
BODY: dict[str, Any] = {
    "metadata": {"name": "web", "namespace": "a", "labels": LABELS},
    "spec": {"node_name": "n1"},
    "status": {"phase": "Running"},
}


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("", True),
        ("pool=big", True),
        ("pool == big", True),
        ("pool=small", False),
        ("pool!=small", True),
        ("colour!=red", True),
        ("pool", True),
        ("!pool", False),
        ("!colour", True),
        ("pool in (small, big)", True),
        ("pool notin (small,big)", False),
        ("colour notin (red)", True),
        ("pool in (big),tier", True),
        ("pool=big,!tier", False),
        ("tier=", True),
        ("size>4", True),
        ("size > 5", False),
        ("size<6", True),
        ("size < +5", False),
        ("size>-1,pool", True),
        ("pool>1", False),
        ("colour<1", False),
        ("size<9223372036854775807", True),
        ("huge>1", False),
    ],
)
def test_labels(text: str, matches: bool) -> None:
    assert selectors.labels(text)(BODY) is matches


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        pytest.param("pool=big)", ": invalid; write it as in `pool=a100`", id="a-parenthesis-too-many"),
        pytest.param("pool in (a,b", ": invalid; write it as in `pool=a100`", id="a-parenthesis-too-few"),
        pytest.param("size>big", "compare with a whole number", id="greater-than-a-word"),
        pytest.param("size>", "compare with a whole number", id="greater-than-nothing"),
        pytest.param("size<" + "9" * 19, "compare with a whole number", id="less-than-a-number-beyond-64-bits"),
        pytest.param("size<" + "9" * 4090, "compare with a whole number", id="less-than-a-number-of-4090-digits"),
        pytest.param("size>=4", ": invalid; write it as in `pool=a100`", id="greater-or-equal"),
        pytest.param("a=b>1", ": invalid; write it as in `pool=a100`", id="two-operators-in-one-term"),
        pytest.param("a," * 100 + "a", "101 terms are too many; write at most 100", id="too-many-terms"),
        pytest.param("a" * 4097, "4097 characters are too many; write at most 4096", id="too-long"),
        pytest.param("," * 4096, "4097 terms", id="nothing-but-commas"),
        pytest.param("a (" * 1000 + ",", ": invalid; write it as in `pool=a100`", id="nothing-but-parentheses"),
    ],
)
def test_invalid_selectors_are_errors_with_a_hint(text: str, hint: str) -> None:
    with pytest.raises(BadSelector, match=re.escape(hint)):
        selectors.labels(text)


@pytest.mark.parametrize(
    "text", ["," * 60_000, "(" * 60_000, "metadata.name=a," * 4000], ids=["commas", "open", "names"]
)
def test_a_long_selector_is_never_parsed(text: str) -> None:
    for read in (selectors.labels, selectors.fields, selectors.only_name):
        with pytest.raises(BadSelector, match="write at most 4096"):
            read(text)


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("", True),
        ("metadata.name=web", True),
        ("metadata.name==web", True),
        ("metadata.name!=web", False),
        ("metadata.namespace=a,spec.nodeName=n1", True),
        ("spec.nodeName=n2", False),
        ("node=n1", True),
        ("spec.node_name=n1", True),
        ("status.phase=Running", True),
    ],
)
def test_fields(text: str, matches: bool) -> None:
    assert selectors.fields(text)(BODY) is matches


@pytest.mark.parametrize(
    ("path", "want"),
    [
        pytest.param("gpuinfos/n1", "n1", id="get"),
        pytest.param("gpuinfos?fieldSelector=metadata.name%3Dn1", "n1", id="a-list-of-one"),
        pytest.param("gpuinfos?watch=1&fieldSelector=node%3Dn2,metadata.name%3D%3Dn1", "n1", id="a-watch-of-one"),
        pytest.param("gpuinfos?fieldSelector=metadata.name!%3Dn1", "", id="all-but-one"),
        pytest.param("gpuinfos", "", id="all"),
    ],
)
def test_a_right_to_one_object_is_a_right_to_list_and_watch_it(path: str, want: str) -> None:
    assert ask(f"{ROOT}/{path}").only == want


@pytest.mark.parametrize("body", [{"metadata": {"name": "x"}, "spec": {"device_node": "n1"}, "status": {}}])
def test_a_node_is_found_by_its_name_too(body: dict[str, Any]) -> None:
    assert selectors.fields("node=n1")(body)
    assert selectors.labels("!pool")(body)
