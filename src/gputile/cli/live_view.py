"""The live view of `top -w`: rendered again whenever the cluster changes, until ^C.

Watches nodes and pods as the scheduler does (list once, then watch), so an idle cluster costs nothing; renders at most
once a second. On a terminal the screen is redrawn in place; in a pipe each change is printed as a block.
"""

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import click

from gputile.cli.output import say, style
from gputile.cli.pod_conditions import PodWithConditions
from gputile.cli.render.terminal import terminal
from gputile.cli.source import ClusterSnapshot, ClusterSource, ShownNode
from gputile.concurrency.tasks import cancel_all
from gputile.kube.client import Client
from gputile.kube.informer import Feed, Informer
from gputile.kube.watch import follow
from gputile.model.errors import InputError
from gputile.text.terminal import one_line, painted

HOME, CLEAR_LINE, CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"
PACE = 1.0  # seconds between two frames

Draw = Callable[[ClusterSnapshot], list[str]]


def keep_drawing(source: ClusterSource, draw: Draw) -> None:
    """Ends on ^C, or when the cluster cannot be read at all."""
    if source.files:
        raise InputError("-w: a file cannot be watched; leave out -f or -w")
    asyncio.run(_watch_cluster(source, draw))


class Screen:
    """The terminal, and the lines that were drawn on it last."""

    def __init__(self) -> None:
        self._last: list[str] = []

    def show(self, lines: list[str]) -> None:
        if lines == self._last:
            return
        self._last = lines
        if not sys.stdout.isatty():
            say(*lines, "")
            return
        fit = terminal().lines - 1
        if len(lines) > fit:
            hidden = len(lines) - fit + 1
            lines = [
                *lines[: fit - 1],
                style(f"... {hidden} more lines: enlarge the window, or --sort", dim=True),
            ]
        drawn = "".join(f"{painted(one_line(line))}{CLEAR_LINE}\n" for line in lines)
        click.echo(HOME + drawn + CLEAR_REST, nl=False)  # our own cursor moves, around lines that were cleaned


async def _watch_cluster(source: ClusterSource, draw: Draw) -> None:
    client = Client(source.access())
    pods = ObjectStore(lambda: follow(client.feed("/api/v1/pods", "Pod", PodWithConditions)))
    nodes = ObjectStore(lambda: follow(client.feed("/api/v1/nodes", "Node", ShownNode)))
    watches = [asyncio.create_task(store.informer.run()) for store in (pods, nodes)]
    screen = Screen()
    try:
        while True:
            failure = pods.informer.failure or nodes.informer.failure
            if is_known := pods.informer.listed.is_set() and nodes.informer.listed.is_set():
                lines = draw(ClusterSnapshot(nodes=list(nodes.items.values()), pods=list(pods.items.values())))
                screen.show([*lines, *([style(failure, fg="red")] if failure else [])])
            elif failure:
                raise InputError(failure)
            for watch in watches:
                if watch.done():
                    watch.result()
            await asyncio.sleep(PACE if is_known else 0.05)
    finally:
        await cancel_all(watches)
        await client.close()


class ObjectStore:
    """All objects of one kind, as the watch last reported them."""

    def __init__(self, feed: Feed[Any]) -> None:
        self.items: dict[str, Any] = {}
        self.informer = Informer(feed, self._listed, self._changed)

    async def _listed(self, items: tuple[Any, ...]) -> None:
        self.items = {_key(item): item for item in items}

    async def _changed(self, item: Any, deleted: bool) -> None:
        if deleted:
            self.items.pop(_key(item), None)
        else:
            self.items[_key(item)] = item


def _key(item: PodWithConditions | ShownNode) -> str:
    return item.key if isinstance(item, PodWithConditions) else item.name
