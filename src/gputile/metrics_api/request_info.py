"""Parses requests to the aggregated API from path, query and headers; an invalid request is a `StatusError`.

`read_list_options` parses everything but the selectors. `with_selectors` parses the selectors, after authorization.
"""

from collections.abc import Callable
from typing import Literal, TypeVar
from urllib.parse import parse_qs, unquote

import msgspec

from gputile.http.messages import Request
from gputile.metrics_api import selectors
from gputile.metrics_api.resources import Resource, resource
from gputile.metrics_api.selectors import BadSelector, Match
from gputile.metrics_api.status import StatusError
from gputile.metrics_api.tables import Include

T = TypeVar("T")

INCLUDES: dict[str, Include] = {"None": "None", "Metadata": "Metadata", "Object": "Object"}


class ResponseFormat(msgspec.Struct, frozen=True):
    """The requested representation of objects: plain, Table or PartialObjectMetadata."""

    kind: Literal["plain", "Table", "PartialObjectMetadata"] = "plain"
    version: str = "v1"  # of meta.k8s.io
    include: Include = "Metadata"  # beside the cells of a Table


class ListOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed get, list or watch request."""

    resource: Resource
    verb: Literal["get", "list", "watch"]
    namespace: str = ""  # "": all namespaces
    name: str = ""
    only: str = ""  # the single name that a field selector restricts a list or watch to
    labels: str = ""  # labelSelector and fieldSelector, as text
    fields: str = ""
    matches: Match = selectors.anything  # the parsed selectors
    shape: ResponseFormat = ResponseFormat()
    is_old: bool = False  # the events (or the list) of nvidia-gpu-scheduler
    version: str = ""  # resourceVersion
    bookmarks: bool = False
    initial: bool | None = None  # sendInitialEvents; None: as the resourceVersion says
    timeout: float | None = None  # seconds


class RequestInfo(msgspec.Struct, frozen=True):
    """A path below /apis, split as the API server does it for RBAC."""

    group: str
    version: str
    resource: str
    namespace: str = ""
    name: str = ""


def read_request_info(path: str) -> RequestInfo | None:
    parts = [unquote(part) for part in path.strip("/").split("/")]
    if len(parts) < 4 or parts[0] != "apis" or not all(parts):
        return None
    _, group, version, *rest = parts
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2:
        _, namespace, *rest = rest
    if len(rest) > 2:
        return None
    return RequestInfo(group, version, rest[0], namespace, rest[1] if len(rest) > 1 else "")


def read_list_options(request: Request) -> ListOptions | None:
    """None: the path names no resource. `StatusError`: a parameter is invalid."""
    info = read_request_info(request.path)
    kind = resource(info.group, info.version, info.resource) if info is not None else None
    if info is None or kind is None or (info.namespace and not kind.namespaced):
        return None
    query = {name: values[-1] for name, values in parse_qs(request.query, keep_blank_values=True).items()}
    watches = not info.name and query.get("watch", "") in ("true", "1", "True", "t", "T")
    events, fields = query.get("events", ""), query.get("fieldSelector", "")
    shape = read_response_format(request.header("accept"), query.get("includeObject", ""))
    return ListOptions(
        resource=kind,
        verb="get" if info.name else "watch" if watches else "list",
        namespace=info.namespace,
        name=info.name,
        only=info.name or _parse(selectors.only_name, fields),
        labels=query.get("labelSelector", ""),
        fields=fields,
        shape=shape,
        is_old=events == "v0.1" or (kind.is_old and shape.kind == "plain" and events != "standard"),
        version=query.get("resourceVersion", ""),
        bookmarks=_flag(query, "allowWatchBookmarks") or False,
        initial=_flag(query, "sendInitialEvents"),
        timeout=_seconds(query.get("timeoutSeconds", "")),
    )


def with_selectors(options: ListOptions) -> ListOptions:
    """The options with parsed selectors; `StatusError` 400 if one is invalid."""
    parsed = _parse(selectors.labels, options.labels), _parse(selectors.fields, options.fields)
    matches = selectors.all_of([match for match in parsed if match is not selectors.anything])
    return msgspec.structs.replace(options, matches=matches)


def _parse(parse: Callable[[str], T], selector: str) -> T:
    try:
        return parse(selector)
    except BadSelector as error:
        raise StatusError(400, "BadRequest", str(error)) from error


def _flag(query: dict[str, str], name: str) -> bool | None:
    value = query.get(name)
    return None if value in (None, "") else value in ("true", "1", "True", "t", "T")


def _seconds(value: str) -> float | None:
    if not value:
        return None
    if not (value.isascii() and value.isdecimal() and len(value) < 10):
        raise StatusError(400, "BadRequest", f"timeoutSeconds: {value!r} is invalid; write whole seconds")
    return float(value) or None


# ---- the Accept header ----------------------------------------------------------------------------------------------


def read_response_format(accept: str, include: str = "") -> ResponseFormat:
    """The first format of the Accept header that is supported."""
    for entry in accept.split(",") if accept.strip() else ["*/*"]:
        media, *rest = (part.strip() for part in entry.split(";"))
        parameters = dict(part.partition("=")[::2] for part in rest)
        if media not in ("application/json", "application/*", "*/*"):
            continue
        supported = _format(parameters.get("as", ""), parameters.get("v", ""), parameters.get("g", ""), include)
        if supported is not None:
            return supported
    raise StatusError(406, "NotAcceptable", f"Accept: {accept!r} is not supported; accept application/json")


def _format(name: str, version: str, group: str, include: str) -> ResponseFormat | None:
    if not name:
        return ResponseFormat()
    if group != "meta.k8s.io" or version not in ("v1", "v1beta1"):
        return None
    match name:
        case "Table":
            return ResponseFormat("Table", version, INCLUDES.get(include, "Metadata"))
        case "PartialObjectMetadata" | "PartialObjectMetadataList":
            return ResponseFormat("PartialObjectMetadata", version)
    return None
