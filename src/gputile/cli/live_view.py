"""Drawing again whenever the cluster changes, until ^C.

Room:  follows nodes and pods as the scheduler does (list once, then watch), so a quiet cluster costs nothing; draws at
       most once a second. On a terminal the screen is drawn over; in a pipe each change is a block of its own.
Door:  `keep_drawing(where, draw)`.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable
from typing import Any

import click

from gputile.cli.output import say, style
from gputile.cli.pod_conditions import PodWithConditions
from gputile.cli.render.terminal import terminal
from gputile.cli.source import ClusterSnapshot, ClusterSource, ShownNode
from gputile.kube.api import Change, Snapshot, WatchFailed
from gputile.kube.api import WatchUpdate as Told
from gputile.kube.client import Client
from gputile.kube.watch import follow
from gputile.model.errors import InputError
from gputile.text.terminal import one_line, painted

HOME, CLEAR_LINE, CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"
PACE = 1.0  # seconds

Draw = Callable[[ClusterSnapshot], list[str]]


def keep_drawing(where: ClusterSource, draw: Draw) -> None:
    """Ends by ^C, or when the cluster cannot be read at all."""
    if where.files:
        raise InputError("-w watches a cluster, and a file does not change; leave -f out, or -w")
    asyncio.run(_cluster(where, draw))


class Screen:
    """What was drawn last."""

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
        click.echo(HOME + drawn + CLEAR_REST, nl=False)  # our own moves of the cursor, around lines that hold none


async def _cluster(where: ClusterSource, draw: Draw) -> None:
    client = Client(where.access())
    pods = ObjectStore(follow(client.feed("/api/v1/pods", "Pod", PodWithConditions)))
    nodes = ObjectStore(follow(client.feed("/api/v1/nodes", "Node", ShownNode)))
    followers = [asyncio.create_task(shelf.fill()) for shelf in (pods, nodes)]
    screen = Screen()
    try:
        while True:
            trouble = pods.trouble or nodes.trouble
            if pods.is_known and nodes.is_known:
                lines = draw(ClusterSnapshot(nodes=list(nodes.items.values()), pods=list(pods.items.values())))
                screen.show([*lines, *([style(trouble, fg="red")] if trouble else [])])
            elif trouble:
                raise InputError(trouble)
            for follower in followers:
                if follower.done():
                    follower.result()
            await asyncio.sleep(PACE if pods.is_known and nodes.is_known else 0.05)
    finally:
        for follower in followers:
            follower.cancel()
        await client.close()


class ObjectStore:
    """All objects of one kind, as the watch last showed them."""

    def __init__(self, feed: AsyncGenerator[Told[Any], None]) -> None:
        self._feed = feed
        self.items: dict[str, Any] = {}
        self.is_known = False
        self.trouble = ""

    async def fill(self) -> None:
        async for told in self._feed:
            if isinstance(told, WatchFailed):
                self.trouble = told.why
                continue
            self.trouble = ""
            if isinstance(told, Snapshot):
                self.items = {_key(item): item for item in told.items}
                self.is_known = True
            elif isinstance(told, Change) and told.kind == "DELETED":
                self.items.pop(_key(told.item), None)
            elif isinstance(told, Change):
                self.items[_key(told.item)] = told.item


def _key(item: PodWithConditions | ShownNode) -> str:
    return item.key if isinstance(item, PodWithConditions) else item.name
