"""A watch in a thread: every event kept with its time, and the objects as they stand.

Room:  lists once, watches on from there, and goes on over a restart of the API server without hiding a gap.
Door:  `with watch(kube, "Pod") as pods:`; then `pods.objects`, `pods.events`, `pods.wait_for`.
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
    """What there is of a kind and, from now on, what happens to it; in all namespaces if none is named."""
    return Watch(kube, kube.resource(kind).path(namespace), selectors(labels, fields))


class Event(msgspec.Struct, frozen=True):
    """One change; what the first list held comes as ADDED."""

    type: str  # ADDED, MODIFIED, DELETED
    object: Manifest
    at: float  # time.monotonic() of its arrival


class Expired(Exception):
    """HTTP 410: the place in the history is gone; list again."""


class Watch:
    """
    listed --watch--> following --connection lost--> following from the last version seen
                          +--410 Expired--> listed anew: what vanished meanwhile comes as DELETED
    """

    def __init__(self, kube: Kube, path: str, query: Mapping[str, str]) -> None:
        self._kube, self._path, self._query = kube, path, dict(query)
        self._objects: dict[Key, Manifest] = {}
        self._events: list[Event] = []
        self._listeners: list[Callable[[Event], None]] = []
        self._news, self._done = threading.Condition(), threading.Event()
        self._socket: socket.socket | None = None
        self._version = ""
        self._broke: Exception | None = None
        self._thread = threading.Thread(target=self._follow, name=f"watch {path}", daemon=True)

    def __enter__(self) -> "Watch":
        self._list()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._done.set()
        self._hang_up()
        self._thread.join(10)

    @property
    def objects(self) -> dict[Key, Manifest]:
        """As they stand, by namespace and name."""
        with self._news:
            return dict(self._objects)

    @property
    def events(self) -> list[Event]:
        with self._news:
            return list(self._events)

    def get(self, namespace: str, name: str) -> Manifest | None:
        with self._news:
            return self._objects.get((namespace, name))

    def each(self, tell: Callable[[Event], None]) -> None:
        """Call `tell` in the watch's thread for each event from now on, after one ADDED for each object there is."""
        with self._news:
            for found in self._objects.values():
                tell(Event("ADDED", found, time.monotonic()))
            self._listeners.append(tell)

    def wait_for(self, true: Callable[[dict[Key, Manifest]], Any], seconds: float, what: str) -> float:
        """Wait until `true(objects)`; returns how long that took. Looks at most every 20 ms.

        A KeyError means not yet: the object, or the field, has not been seen.
        """
        began, heard = time.monotonic(), len(self._events)
        while (answer := self._asked(true)) is not None:
            left = began + seconds - time.monotonic()
            if self._broke or left <= 0:
                seen = f"{answer}; {len(self.objects)} objects, {len(self.events)} events seen of {self._path}"
                raise TookTooLong(f"waited {seconds:g} s in vain for {what} ({self._broke or seen})")
            heard = self._more_than(heard, min(left, 0.5))
            time.sleep(0.02)
        return time.monotonic() - began

    def _more_than(self, heard: int, seconds: float) -> int:
        """Wait for an event after the first `heard`; how many there are now."""
        with self._news:
            self._news.wait_for(lambda: len(self._events) > heard, seconds)
            return len(self._events)

    def _asked(self, true: Callable[[dict[Key, Manifest]], Any]) -> str | None:
        """None for yes, else why not."""
        try:
            answer = true(self.objects)
        except KeyError as missing:
            return f"no {missing}"
        return None if answer else f"last answer {answer!r}"

    # --- in the thread

    def _follow(self) -> None:
        while not self._done.is_set():
            try:
                if not self._version:
                    self._list()
                self._watch()
            except Expired:
                self._version = ""
            except ApiError as no:
                if no.status in (401, 403, 404):
                    self._broke = no
                    return
                self._done.wait(RETRY)
            except (OSError, HTTPException, ValueError):  # ValueError: a read on what `close` closed
                self._done.wait(RETRY)

    def _list(self) -> None:
        listed = self._kube.request("GET", f"{self._path}?{urlencode(self._query)}")
        kind = {"apiVersion": listed["apiVersion"], "kind": listed["kind"].removesuffix("List")}
        found = {_key(item): {**kind, **item} for item in listed["items"] or []}
        for key in set(self._objects) - set(found):
            self._take("DELETED", self._objects[key])
        for key, item in found.items():
            if _version(self._objects.get(key)) != _version(item):
                self._take("MODIFIED" if key in self._objects else "ADDED", item)
        self._version = listed["metadata"]["resourceVersion"]

    def _watch(self) -> None:
        how = {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": str(SERVER_TIMEOUT)}
        query = urlencode({**self._query, **how, "resourceVersion": self._version})
        connection = self._kube.connections.new(timeout=SERVER_TIMEOUT + 30)
        try:
            for line in self._lines(connection, f"{self._path}?{query}"):
                self._hear(msgspec.json.decode(line))
        finally:
            self._socket = None
            connection.close()

    def _lines(self, connection: HTTPConnection, path: str) -> Iterator[bytes]:
        connection.connect()
        self._socket = connection.sock
        if self._done.is_set():  # closed while connecting: nobody else would hang up
            return
        connection.request("GET", path, headers=self._kube.headers())
        answer = connection.getresponse()
        if answer.status == 410:
            raise Expired
        if answer.status >= 400:
            raise ApiError(answer.status, answer.reason, answer.read().decode(errors="replace")[:500], f"WATCH {path}")
        yield from _split(answer)

    def _hear(self, said: Manifest) -> None:
        if said["type"] == "ERROR":
            if said["object"].get("code") == 410:
                raise Expired
            raise OSError(f"the watch of {self._path} ended: {said['object'].get('message')}")
        if said["type"] != "BOOKMARK":
            self._take(said["type"], said["object"])
        self._version = said["object"]["metadata"]["resourceVersion"]

    def _take(self, kind: str, found: Manifest) -> None:
        event = Event(kind, found, time.monotonic())
        with self._news:
            if kind == "DELETED":
                self._objects.pop(_key(found), None)
            else:
                self._objects[_key(found)] = found
            self._events.append(event)
            for tell in self._listeners:
                tell(event)
            self._news.notify_all()

    def _hang_up(self) -> None:
        """Wake the reader: past SSL's own shutdown, which would pull its state from under the reading thread."""
        held = self._socket
        if held is not None:
            with suppress(OSError):
                socket.socket.shutdown(held, socket.SHUT_RDWR)


def _split(answer: HTTPResponse) -> Iterator[bytes]:
    rest = b""
    while block := answer.read1(1 << 16):
        *lines, rest = (rest + block).split(b"\n")
        yield from lines


def _key(found: Manifest) -> Key:
    return found["metadata"].get("namespace", ""), found["metadata"]["name"]


def _version(found: Manifest | None) -> str | None:
    return found["metadata"]["resourceVersion"] if found else None
