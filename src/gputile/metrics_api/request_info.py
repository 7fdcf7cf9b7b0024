"""What somebody asks of the aggregated API, read from path, query and headers.

Room:  text in, one value out. What cannot be understood is a `StatusError` to answer with.
Door:  `read_list_options(request)`: an `ListOptions` for objects, or None where the path names none; `ResponseFormat`
       is how they are wanted. `selected(ask)` reads its selectors, too: work that is done only for those who may ask.
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
    """How objects are wanted."""

    kind: Literal["plain", "Table", "PartialObjectMetadata"] = "plain"
    version: str = "v1"  # of meta.k8s.io
    include: Include = "Metadata"  # beside the cells of a Table


class ListOptions(msgspec.Struct, frozen=True, kw_only=True):
    resource: Resource
    verb: Literal["get", "list", "watch"]
    namespace: str = ""  # "" is all of them
    name: str = ""
    only: str = ""  # the name that a field selector narrows a list or watch to
    labels: str = ""  # labelSelector, fieldSelector: as written
    fields: str = ""
    matches: Match = selectors.anything  # what they mean, once they were read
    shape: ResponseFormat = ResponseFormat()
    is_old: bool = False  # the events (or the list) of nvidia-gpu-scheduler
    version: str = ""  # resourceVersion
    bookmarks: bool = False
    initial: bool | None = None  # sendInitialEvents; None: as the resourceVersion says
    timeout: float | None = None  # seconds


class RequestInfo(msgspec.Struct, frozen=True):
    """A path below /apis, taken apart as the API server does it for RBAC."""

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
    """`StatusError` is raised where something in it makes no sense."""
    place = read_request_info(request.path)
    found = resource(place.group, place.version, place.resource) if place is not None else None
    if place is None or found is None or (place.namespace and not found.namespaced):
        return None
    query = {name: values[-1] for name, values in parse_qs(request.query, keep_blank_values=True).items()}
    watches = not place.name and query.get("watch", "") in ("true", "1", "True", "t", "T")
    events, fields = query.get("events", ""), query.get("fieldSelector", "")
    shape = read_response_format(request.header("accept"), query.get("includeObject", ""))
    return ListOptions(
        resource=found,
        verb="get" if place.name else "watch" if watches else "list",
        namespace=place.namespace,
        name=place.name,
        only=place.name or _understood(selectors.only_name, fields),
        labels=query.get("labelSelector", ""),
        fields=fields,
        shape=shape,
        is_old=events == "v0.1" or (found.is_old and shape.kind == "plain" and events != "standard"),
        version=query.get("resourceVersion", ""),
        bookmarks=_flag(query, "allowWatchBookmarks") or False,
        initial=_flag(query, "sendInitialEvents"),
        timeout=_seconds(query.get("timeoutSeconds", "")),
    )


def selected(ask: ListOptions) -> ListOptions:
    """With what its selectors mean; `StatusError` 400 where that is nothing."""
    read = _understood(selectors.labels, ask.labels), _understood(selectors.fields, ask.fields)
    matches = selectors.all_of([match for match in read if match is not selectors.anything])
    return msgspec.structs.replace(ask, matches=matches)


def _understood(read: Callable[[str], T], selector: str) -> T:
    try:
        return read(selector)
    except BadSelector as wrong:
        raise StatusError(400, "BadRequest", str(wrong)) from wrong


def _flag(query: dict[str, str], name: str) -> bool | None:
    said = query.get(name)
    return None if said in (None, "") else said in ("true", "1", "True", "t", "T")


def _seconds(said: str) -> float | None:
    if not said:
        return None
    if not (said.isascii() and said.isdecimal() and len(said) < 10):
        raise StatusError(400, "BadRequest", f"timeoutSeconds is {said!r}; write whole seconds")
    return float(said) or None


# ---- what is accepted -----------------------------------------------------------------------------------------------


def read_response_format(accept: str, include: str = "") -> ResponseFormat:
    """The first that we can write of what the client can read."""
    for one in accept.split(",") if accept.strip() else ["*/*"]:
        media, *rest = (part.strip() for part in one.split(";"))
        wanted = dict(part.partition("=")[::2] for part in rest)
        if media not in ("application/json", "application/*", "*/*"):
            continue
        found = _shape(wanted.get("as", ""), wanted.get("v", ""), wanted.get("g", ""), include)
        if found is not None:
            return found
    raise StatusError(406, "NotAcceptable", f"only JSON is written here, and {accept!r} does not take it")


def _shape(wanted: str, version: str, group: str, include: str) -> ResponseFormat | None:
    if not wanted:
        return ResponseFormat()
    if group != "meta.k8s.io" or version not in ("v1", "v1beta1"):
        return None
    match wanted:
        case "Table":
            return ResponseFormat("Table", version, INCLUDES.get(include, "Metadata"))
        case "PartialObjectMetadata" | "PartialObjectMetadataList":
            return ResponseFormat("PartialObjectMetadata", version)
    return None
