"""Lists, single objects and watches, written as they are wanted.

Room:  asks in, bytes out, a slice at a time so that verbs are answered in between. Who may ask was decided before.
Door:  `ResourceHandlers.get`, `ResourceHandlers.listed`, `ResourceHandlers.watch`; a `StatusError` is raised where
       there is nothing to show.

A watch reads the collection's own log, each at its own pace; nothing is queued for it. One that falls further behind
than the log reaches is told so (410) and ends.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress

import orjson

from gputile.metrics_api import tables
from gputile.metrics_api.projection import Projection, Wall
from gputile.metrics_api.request_info import ListOptions
from gputile.metrics_api.resources import old_object
from gputile.metrics_api.status import StatusError, expired
from gputile.metrics_api.watch_cache import CachedEvent, CachedObject, Json, ResourceExpired, WatchCache

SLICE = 200  # objects that are written in one go
CHUNK = 100  # events: each may have to be looked at twice, as it was and as it is
BOOKMARK = 60.0  # seconds
SHORTEST, LONGEST = (
    1800.0,
    3600.0,
)  # seconds of a watch that does not say how long: apart, so that not all return at once
INITIAL_END = {"k8s.io/initial-events-end": "true"}


async def breathe() -> None:
    await asyncio.sleep(0)


class ResourceHandlers:
    """See the module's text."""

    def __init__(self, window: Projection, wall: Wall, breath: Callable[[], Awaitable[None]] = breathe) -> None:
        self._window, self._wall, self._breathe = window, wall, breath
        self.bookmark = BOOKMARK

    @property
    def is_whole(self) -> bool:
        """Whether all there is can be shown; until then a list would be a part and look like all."""
        return self._window.is_whole

    # ---- get and list -----------------------------------------------------------------------------------------------

    def get(self, ask: ListOptions) -> bytes:
        key = ask.resource.key(ask.namespace, ask.name)
        item = self._collection(ask).find(key) if key is not None else None
        if item is None:
            group, plural = ask.resource.group, ask.resource.plural
            message = f'{plural}.{group} "{ask.name}" not found'
            raise StatusError(404, "NotFound", message, name=ask.name, group=group, kind=plural)
        body = self._body(ask, item, item.version)
        return orjson.dumps(self._shaped(ask, body) if not ask.is_old else body)

    async def listed(self, ask: ListOptions) -> bytes:
        collection = self._collection(ask)
        version, items = collection.version, collection.items()
        parts: list[bytes] = []
        async for bodies in self._slices(ask, items):
            parts += [orjson.dumps(one) for one in self._parts(ask, bodies)]
        begin, end = self._envelope(ask, {"resourceVersion": collection.written(version)})
        return begin + b",".join(parts) + end

    async def _slices(self, ask: ListOptions, items: list[CachedObject]) -> AsyncGenerator[list[Json], None]:
        for start in range(0, len(items), SLICE):
            part = items[start : start + SLICE]
            yield [body for item in part if (body := self._wanted(ask, item, item.version)) is not None]
            await self._breathe()

    def _parts(self, ask: ListOptions, bodies: list[Json]) -> list[Json]:
        """What stands in the list."""
        if ask.is_old:
            return [body if ask.resource.is_old else old_object(body) for body in bodies]
        match ask.shape.kind:
            case "Table":
                rows: list[Json] = self._table(ask, bodies)["rows"]
                return rows
            case "PartialObjectMetadata":
                return [tables.partial(body, ask.shape.version) for body in bodies]
        return bodies

    def _envelope(self, ask: ListOptions, metadata: Json) -> tuple[bytes, bytes]:
        """What stands around the parts."""
        found, shape = ask.resource, ask.shape
        if ask.is_old and not found.is_old:
            whole: Json = {"kind": "List", "apiVersion": "v1", "items": []}
        elif shape.kind == "Table":
            whole = {**self._table(ask, []), "metadata": metadata}
        else:
            partial = shape.kind == "PartialObjectMetadata"
            kind = "PartialObjectMetadataList" if partial else f"{found.kind}List"
            api_version = f"meta.k8s.io/{shape.version}" if partial else found.api_version
            whole = {"kind": kind, "apiVersion": api_version, "metadata": metadata, "items": []}
        begin, _, end = orjson.dumps(whole).rpartition(b"[]")
        return begin + b"[", b"]" + end

    # ---- watch ------------------------------------------------------------------------------------------------------

    def watch(self, ask: ListOptions) -> AsyncGenerator[bytes, None]:
        """`StatusError` 410 at once, where the resourceVersion is not one that we can go on from."""
        collection = self._collection(ask)
        replays = ask.initial if ask.initial is not None else ask.version in ("", "0")
        if replays or ask.version in ("", "0"):
            version = collection.version
        else:
            try:
                version = collection.read(ask.version)
                collection.since(version, 0)
            except ResourceExpired:
                raise expired() from None
        return self._follow(ask, collection, version, collection.closings, replays=replays)

    async def _follow(
        self, ask: ListOptions, collection: WatchCache, version: int, closings: int, *, replays: bool
    ) -> AsyncGenerator[bytes, None]:
        clock = asyncio.get_running_loop().time
        until = clock() + (ask.timeout or random.uniform(SHORTEST, LONGEST))
        if replays:
            items, version = collection.items(), collection.version
            async for bodies in self._slices(ask, items):
                yield b"".join(self._line(ask, "ADDED", body) for body in bodies)
            if ask.initial and not ask.is_old:
                yield self._bookmark(ask, collection.written(version), INITIAL_END)
        bookmark_at = clock() + self.bookmark
        while collection.closings == closings and clock() < until:
            news = collection.news
            try:
                events = collection.since(version, CHUNK)
            except ResourceExpired:
                if not ask.is_old:  # the old stream has no word for it; its end says that one has to begin anew
                    yield _encoded({"type": "ERROR", "object": expired().body()})
                return
            if events:
                version = events[-1].version
                if piece := b"".join(line for event in events for line in self._lines(ask, event)):
                    yield piece
                await self._breathe()
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(min(until, bookmark_at)):
                        await news()
            if clock() >= bookmark_at:
                bookmark_at = clock() + self.bookmark
                if ask.bookmarks and not ask.is_old:
                    yield self._bookmark(ask, collection.written(version))

    def _lines(self, ask: ListOptions, event: CachedEvent) -> list[bytes]:
        """What the change means for somebody who sees only what the selectors match."""
        before = self._wanted(ask, event.before, event.version) if event.before is not None else None
        after = self._wanted(ask, event.after, event.version) if event.after is not None else None
        if after is not None:
            return [self._line(ask, "ADDED" if before is None else "MODIFIED", after)]
        return [self._line(ask, "DELETED", before)] if before is not None else []

    def _line(self, ask: ListOptions, how: str, body: Json) -> bytes:
        if ask.is_old:
            return _encoded(ask.resource.old_event("DELETED" if how == "DELETED" else "SYNCED", body))
        return _encoded({"type": how, "object": self._shaped(ask, body)})

    def _bookmark(self, ask: ListOptions, version: str, annotations: Json | None = None) -> bytes:
        metadata: Json = {"resourceVersion": version, "creationTimestamp": None}
        if annotations:
            metadata["annotations"] = annotations
        found = ask.resource
        body: Json = {"kind": found.kind, "apiVersion": found.api_version, "metadata": metadata}
        if ask.shape.kind == "Table":
            row = {"cells": [], "object": tables.partial(body, ask.shape.version)}
            body = {**self._table(ask, []), "metadata": metadata, "rows": [row]}
        elif ask.shape.kind == "PartialObjectMetadata":
            body = tables.partial(body, ask.shape.version)
        return _encoded({"type": "BOOKMARK", "object": body})

    # ---- one object -------------------------------------------------------------------------------------------------

    def _collection(self, ask: ListOptions) -> WatchCache:
        return self._window.nodes if ask.resource.of == "nodes" else self._window.pods

    def _wanted(self, ask: ListOptions, item: CachedObject, version: int) -> Json | None:
        if ask.namespace and item.key[0] != ask.namespace:
            return None
        body = self._body(ask, item, version)
        return body if ask.matches(body) else None

    def _body(self, ask: ListOptions, item: CachedObject, version: int) -> Json:
        """The object of the kind that was asked for, with all that is known of it now."""
        window = self._window
        body = window.node_as_of_now(item) if ask.resource.of == "nodes" else window.pod_as_of_now(item)
        written = self._collection(ask).written(version)
        return ask.resource.shape({**body, "metadata": {**body["metadata"], "resourceVersion": written}})

    def _shaped(self, ask: ListOptions, body: Json) -> Json:
        match ask.shape.kind:
            case "Table":
                return self._table(ask, [body])
            case "PartialObjectMetadata":
                return tables.partial(body, ask.shape.version)
        return body

    def _table(self, ask: ListOptions, bodies: list[Json]) -> Json:
        shape, of = ask.shape, ask.resource.of
        metadata = {"resourceVersion": bodies[0]["metadata"]["resourceVersion"]} if bodies else {}
        now, include = self._wall(), shape.include
        return tables.table(of, bodies, now, version=shape.version, metadata=metadata, include=include)


def _encoded(event: Json) -> bytes:
    return orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE)
