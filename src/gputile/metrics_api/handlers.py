"""The handlers of get, list and watch: they turn parsed requests into response bytes, in the requested format.

They work in slices, so that extender calls are answered in between. Requests are authorized before they get here. A
`StatusError` is the response where there is no object.

Every watch reads the cache's log at its own pace; nothing is queued for it. A watch that falls behind the log gets
410 Expired and ends.
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

SLICE = 200  # objects that are encoded without interruption
CHUNK = 100  # events: each may be matched twice, before and after the change
BOOKMARK = 60.0  # seconds
SHORTEST, LONGEST = (
    1800.0,
    3600.0,
)  # seconds of a watch without timeoutSeconds: random, so that clients do not reconnect all at once
INITIAL_END = {"k8s.io/initial-events-end": "true"}


async def yield_to_loop() -> None:
    """Let other tasks of the event loop run."""
    await asyncio.sleep(0)


class ResourceHandlers:
    """Answers get, list and watch from the projection of the cluster."""

    def __init__(
        self, projection: Projection, wall: Wall, yield_loop: Callable[[], Awaitable[None]] = yield_to_loop
    ) -> None:
        self._projection, self._wall, self._yield_to_loop = projection, wall, yield_loop
        self.bookmark = BOOKMARK

    @property
    def is_complete(self) -> bool:
        """Whether the projection has all objects; until then a list would be partial and look complete."""
        return self._projection.is_complete

    # ---- get and list -----------------------------------------------------------------------------------------------

    def get(self, options: ListOptions) -> bytes:
        key = options.resource.key(options.namespace, options.name)
        item = self._collection(options).find(key) if key is not None else None
        if item is None:
            group, plural = options.resource.group, options.resource.plural
            message = f'{plural}.{group} "{options.name}" not found'
            raise StatusError(404, "NotFound", message, name=options.name, group=group, kind=plural)
        body = self._body(options, item, item.version)
        return orjson.dumps(self._format(options, body) if not options.is_old else body)

    async def listed(self, options: ListOptions) -> bytes:
        collection = self._collection(options)
        version, items = collection.version, collection.items()
        parts: list[bytes] = []
        async for bodies in self._slices(options, items):
            parts += [orjson.dumps(part) for part in self._parts(options, bodies)]
        begin, end = self._envelope(options, {"resourceVersion": collection.written(version)})
        return begin + b",".join(parts) + end

    async def _slices(self, options: ListOptions, items: list[CachedObject]) -> AsyncGenerator[list[Json], None]:
        for start in range(0, len(items), SLICE):
            part = items[start : start + SLICE]
            yield [body for item in part if (body := self._matching_body(options, item, item.version)) is not None]
            await self._yield_to_loop()

    def _parts(self, options: ListOptions, bodies: list[Json]) -> list[Json]:
        """The entries of the list, in the requested format."""
        if options.is_old:
            return [body if options.resource.is_old else old_object(body) for body in bodies]
        match options.shape.kind:
            case "Table":
                rows: list[Json] = self._table(options, bodies)["rows"]
                return rows
            case "PartialObjectMetadata":
                return [tables.partial(body, options.shape.version) for body in bodies]
        return bodies

    def _envelope(self, options: ListOptions, metadata: Json) -> tuple[bytes, bytes]:
        """The text before and after the entries."""
        resource, shape = options.resource, options.shape
        if options.is_old and not resource.is_old:
            whole: Json = {"kind": "List", "apiVersion": "v1", "items": []}
        elif shape.kind == "Table":
            whole = {**self._table(options, []), "metadata": metadata}
        else:
            partial = shape.kind == "PartialObjectMetadata"
            kind = "PartialObjectMetadataList" if partial else f"{resource.kind}List"
            api_version = f"meta.k8s.io/{shape.version}" if partial else resource.api_version
            whole = {"kind": kind, "apiVersion": api_version, "metadata": metadata, "items": []}
        begin, _, end = orjson.dumps(whole).rpartition(b"[]")
        return begin + b"[", b"]" + end

    # ---- watch ------------------------------------------------------------------------------------------------------

    def watch(self, options: ListOptions) -> AsyncGenerator[bytes, None]:
        """`StatusError` 410 at once, if the watch cannot continue from this resourceVersion."""
        collection = self._collection(options)
        replays = options.initial if options.initial is not None else options.version in ("", "0")
        if replays or options.version in ("", "0"):
            version = collection.version
        else:
            try:
                version = collection.read(options.version)
                collection.since(version, 0)
            except ResourceExpired:
                raise expired() from None
        return self._stream(options, collection, version, collection.closings, replays=replays)

    async def _stream(
        self, options: ListOptions, collection: WatchCache, version: int, closings: int, *, replays: bool
    ) -> AsyncGenerator[bytes, None]:
        clock = asyncio.get_running_loop().time
        until = clock() + (options.timeout or random.uniform(SHORTEST, LONGEST))
        if replays:
            items, version = collection.items(), collection.version
            async for bodies in self._slices(options, items):
                yield b"".join(self._line(options, "ADDED", body) for body in bodies)
            if options.initial and not options.is_old:
                yield self._bookmark(options, collection.written(version), INITIAL_END)
        bookmark_at = clock() + self.bookmark
        while collection.closings == closings and clock() < until:
            news = collection.news
            try:
                events = collection.since(version, CHUNK)
            except ResourceExpired:
                if not options.is_old:  # the old stream has no error event: its end makes the client start again
                    yield _encode({"type": "ERROR", "object": expired().body()})
                return
            if events:
                version = events[-1].version
                if piece := b"".join(line for event in events for line in self._lines(options, event)):
                    yield piece
                await self._yield_to_loop()
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(min(until, bookmark_at)):
                        await news()
            if clock() >= bookmark_at:
                bookmark_at = clock() + self.bookmark
                if options.bookmarks and not options.is_old:
                    yield self._bookmark(options, collection.written(version))

    def _lines(self, options: ListOptions, event: CachedEvent) -> list[bytes]:
        """The watch events of a change, for a client that sees only the objects matching its selectors."""
        before = self._matching_body(options, event.before, event.version) if event.before is not None else None
        after = self._matching_body(options, event.after, event.version) if event.after is not None else None
        if after is not None:
            return [self._line(options, "ADDED" if before is None else "MODIFIED", after)]
        return [self._line(options, "DELETED", before)] if before is not None else []

    def _line(self, options: ListOptions, how: str, body: Json) -> bytes:
        if options.is_old:
            return _encode(options.resource.old_event("DELETED" if how == "DELETED" else "SYNCED", body))
        return _encode({"type": how, "object": self._format(options, body)})

    def _bookmark(self, options: ListOptions, version: str, annotations: Json | None = None) -> bytes:
        metadata: Json = {"resourceVersion": version, "creationTimestamp": None}
        if annotations:
            metadata["annotations"] = annotations
        resource = options.resource
        body: Json = {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": metadata}
        if options.shape.kind == "Table":
            row = {"cells": [], "object": tables.partial(body, options.shape.version)}
            body = {**self._table(options, []), "metadata": metadata, "rows": [row]}
        elif options.shape.kind == "PartialObjectMetadata":
            body = tables.partial(body, options.shape.version)
        return _encode({"type": "BOOKMARK", "object": body})

    # ---- one object -------------------------------------------------------------------------------------------------

    def _collection(self, options: ListOptions) -> WatchCache:
        return self._projection.nodes if options.resource.of == "nodes" else self._projection.pods

    def _matching_body(self, options: ListOptions, item: CachedObject, version: int) -> Json | None:
        if options.namespace and item.key[0] != options.namespace:
            return None
        body = self._body(options, item, version)
        return body if options.matches(body) else None

    def _body(self, options: ListOptions, item: CachedObject, version: int) -> Json:
        """The object in the requested kind, with the present heartbeat and usage."""
        projection = self._projection
        body = projection.node_as_of_now(item) if options.resource.of == "nodes" else projection.pod_as_of_now(item)
        written = self._collection(options).written(version)
        return options.resource.shape({**body, "metadata": {**body["metadata"], "resourceVersion": written}})

    def _format(self, options: ListOptions, body: Json) -> Json:
        match options.shape.kind:
            case "Table":
                return self._table(options, [body])
            case "PartialObjectMetadata":
                return tables.partial(body, options.shape.version)
        return body

    def _table(self, options: ListOptions, bodies: list[Json]) -> Json:
        shape, of = options.shape, options.resource.of
        metadata = {"resourceVersion": bodies[0]["metadata"]["resourceVersion"]} if bodies else {}
        now, include = self._wall(), shape.include
        return tables.table(of, bodies, now, version=shape.version, metadata=metadata, include=include)


def _encode(event: Json) -> bytes:
    return orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE)
