"""A list and watch in a thread: it records every event with its time, and caches the current objects.

It reconnects after a restart of the API server and must not hide a gap: objects deleted meanwhile become DELETED.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlencode

import msgspec

from tests.e2e.api import ApiError, Kube, Manifest, selectors
from tests.e2e.processes import TookTooLong

Key = tuple[str, str]  # namespace ("" for cluster-wide kinds), name
RETRY = 0.1
SERVER_TIMEOUT = 300


def watch(kube: Kube, kind: str, namespace: str | None = None, labels: str = "", fields: str = "") -> "Watch":
    """A watch of the objects of a kind; of every namespace unless one is named."""
    return Watch(kube, kube.resource(kind).path(namespace), selectors(labels, fields))


class Event(msgspec.Struct, frozen=True):
    """One change; the objects of the first list are ADDED."""

    type: str  # ADDED, MODIFIED, DELETED
    object: Manifest
    at: float  # time.monotonic() of its arrival


class Expired(Exception):
    """HTTP 410: the resourceVersion has expired; list again."""


class Watch:
    """A list and watch of one kind, with its events and a cache of the current objects.

    listed --watch--> following --connection lost--> following from the last resourceVersion seen
                          +--410 Expired--> listed again: objects that are gone become DELETED
    """

    def __init__(self, kube: Kube, path: str, query: Mapping[str, str]) -> None:
        self._kube, self._path, self._query = kube, path, dict(query)
        self._objects: dict[Key, Manifest] = {}
        self._events: list[Event] = []
        self._handlers: list[Callable[[Event], None]] = []
        self._changed, self._done = threading.Condition(), threading.Event()
        self._socket: socket.socket | None = None
        self._version = ""
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._follow, name=f"watch {path}", daemon=True)

    def __enter__(self) -> "Watch":
        self._list()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._done.set()
        self._disconnect()
        self._thread.join(10)

    @property
    def objects(self) -> dict[Key, Manifest]:
        """The current objects, by namespace and name."""
        with self._changed:
            return dict(self._objects)

    @property
    def events(self) -> list[Event]:
        with self._changed:
            return list(self._events)

    def get(self, namespace: str, name: str) -> Manifest | None:
        with self._changed:
            return self._objects.get((namespace, name))

    def each(self, handle: Callable[[Event], None]) -> None:
        """Call `handle` with one ADDED per current object, then in the watch's thread for each new event."""
        with self._changed:
            for manifest in self._objects.values():
                handle(Event("ADDED", manifest, time.monotonic()))
            self._handlers.append(handle)

    def wait_for(self, true: Callable[[dict[Key, Manifest]], Any], seconds: float, what: str) -> float:
        """Wait until `true(objects)`, checked at most every 20 ms; return the seconds that it took.

        A KeyError counts as false: the object, or the field, does not exist yet.
        """
        began, count = time.monotonic(), len(self._events)
        while (reason := self._why_not(true)) is not None:
            left = began + seconds - time.monotonic()
            if self._failure or left <= 0:
                seen = f"{reason}; {len(self.objects)} objects, {len(self.events)} events seen of {self._path}"
                raise TookTooLong(f"timed out after {seconds:g} s waiting for: {what} ({self._failure or seen})")
            count = self._more_than(count, min(left, 0.5))
            time.sleep(0.02)
        return time.monotonic() - began

    def _more_than(self, count: int, seconds: float) -> int:
        """Wait for an event after the first `count`; return the current number of events."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._events) > count, seconds)
            return len(self._events)

    def _why_not(self, true: Callable[[dict[Key, Manifest]], Any]) -> str | None:
        """None if the condition is true, else the reason."""
        try:
            result = true(self.objects)
        except KeyError as missing:
            return f"no {missing}"
        return None if result else f"last result {result!r}"

    # --- in the thread

    def _follow(self) -> None:
        while not self._done.is_set():
            try:
                if not self._version:
                    self._list()
                self._watch()
            except Expired:
                self._version = ""
            except ApiError as error:
                if error.status in (401, 403, 404):
                    self._failure = error
                    return
                self._done.wait(RETRY)
            except (OSError, HTTPException, ValueError):  # ValueError: a read on a closed connection
                self._done.wait(RETRY)

    def _list(self) -> None:
        listed = self._kube.request("GET", f"{self._path}?{urlencode(self._query)}")
        kind = {"apiVersion": listed["apiVersion"], "kind": listed["kind"].removesuffix("List")}
        items = {_key(item): {**kind, **item} for item in listed["items"] or []}
        for key in set(self._objects) - set(items):
            self._record("DELETED", self._objects[key])
        for key, item in items.items():
            if _version(self._objects.get(key)) != _version(item):
                self._record("MODIFIED" if key in self._objects else "ADDED", item)
        self._version = listed["metadata"]["resourceVersion"]

    def _watch(self) -> None:
        how = {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": str(SERVER_TIMEOUT)}
        query = urlencode({**self._query, **how, "resourceVersion": self._version})
        connection = self._kube.connections.new(timeout=SERVER_TIMEOUT + 30)
        try:
            for line in self._lines(connection, f"{self._path}?{query}"):
                self._handle(msgspec.json.decode(line))
        finally:
            self._socket = None
            connection.close()

    def _lines(self, connection: HTTPConnection, path: str) -> Iterator[bytes]:
        connection.connect()
        self._socket = connection.sock
        if self._done.is_set():  # closed while connecting: `close` did not see this socket
            return
        connection.request("GET", path, headers=self._kube.headers())
        response = connection.getresponse()
        if response.status == 410:
            raise Expired
        if response.status >= 400:
            raise ApiError(
                response.status, response.reason, response.read().decode(errors="replace")[:500], f"WATCH {path}"
            )
        yield from _split(response)

    def _handle(self, event: Manifest) -> None:
        if event["type"] == "ERROR":
            if event["object"].get("code") == 410:
                raise Expired
            raise OSError(f"the watch of {self._path} ended: {event['object'].get('message')}")
        if event["type"] != "BOOKMARK":
            self._record(event["type"], event["object"])
        self._version = event["object"]["metadata"]["resourceVersion"]

    def _record(self, kind: str, manifest: Manifest) -> None:
        event = Event(kind, manifest, time.monotonic())
        with self._changed:
            if kind == "DELETED":
                self._objects.pop(_key(manifest), None)
            else:
                self._objects[_key(manifest)] = manifest
            self._events.append(event)
            for handle in self._handlers:
                handle(event)
            self._changed.notify_all()

    def _disconnect(self) -> None:
        """Wake the reader. SSL's own shutdown is bypassed: it would change state that the reading thread uses."""
        sock = self._socket
        if sock is not None:
            with suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _split(response: HTTPResponse) -> Iterator[bytes]:
    rest = b""
    while block := response.read1(1 << 16):
        *lines, rest = (rest + block).split(b"\n")
        yield from lines


def _key(manifest: Manifest) -> Key:
    return manifest["metadata"].get("namespace", ""), manifest["metadata"]["name"]


def _version(manifest: Manifest | None) -> str | None:
    return manifest["metadata"]["resourceVersion"] if manifest else None
