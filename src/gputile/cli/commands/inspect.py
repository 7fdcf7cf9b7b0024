"""`gputile inspect`: who holds which part of which card, node by node."""

import time
from typing import Any

import click

from gputile.cli.cluster_summary import summarize
from gputile.cli.lookup import complete_node, node_named
from gputile.cli.output import say
from gputile.cli.render.cluster import cluster_lines, node_lines
from gputile.cli.render.terminal import PROGRAMS, emit, output_option, terminal
from gputile.cli.source import ClusterSource, cluster_options, unit_option
from gputile.cli.usage import live_usage
from gputile.dialects.settings import DialectSettings

EPILOG = """\b
Examples:
  gputile inspect                    every node with cards: cards, pods, amounts
  gputile inspect a100-1             one node
  gputile inspect -o wide            with UUIDs and slots
  gputile inspect -o json | jq '.nodes[].cards[] | select(.pods == []).uuid'

\b
`gputile top` has the same in one line per node. `kubectl inspect gpushare` prints gpushare's own table.
Exit codes: 0 printed, 2 nodes or pods could not be read (docs/cli.md).
"""


@click.command("inspect", epilog=EPILOG)
@click.argument("node", required=False, shell_complete=complete_node)
@output_option()
@unit_option
@cluster_options
def command(
    node: str | None,
    output: str,
    gpushare_unit: Any,
    files: tuple[str, ...],
    kubeconfig: str | None,
    context: str | None,
) -> None:
    """Who holds which part of which card, node by node.

    Reads the grants that pods carry, or the records of the system that placed them. Needs the right to list nodes and
    pods, and nothing installed in the cluster.
    """
    where = ClusterSource(kubeconfig=kubeconfig, context=context, files=files)
    found = summarize(where.look(), DialectSettings(gpushare_unit=gpushare_unit), time.time(), live_usage(where))
    chosen = [node_named(node, found.nodes)] if node is not None else list(found.nodes)
    if output in PROGRAMS:
        emit(chosen[0] if node is not None else found, output)
        return
    sheet = terminal()
    blocks = [node_lines(one, sheet, time.time(), wide=output == "wide") for one in chosen]
    lines = blocks or [cluster_lines(found, sheet, "name", wide=False)]
    say(*[line for block in lines for line in ("", *block)][1:])
