"""`gputile inspect`: the pods on every GPU and the share that each holds, node by node."""

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
  gputile inspect                    every GPU node: GPUs, pods, shares
  gputile inspect a100-1             one node
  gputile inspect -o wide            with UUIDs and slots
  gputile inspect -o json | jq '.nodes[].cards[] | select(.pods == []).uuid'

\b
`gputile top` shows one line per node. `kubectl inspect gpushare` prints gpushare's own table.
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
    """List the pods on every GPU and the share that each holds, node by node.

    Reads the grants that pods carry, or the records of the system that placed them. Needs the right to list nodes and
    pods, and nothing installed in the cluster.
    """
    source = ClusterSource(kubeconfig=kubeconfig, context=context, files=files)
    settings = DialectSettings(gpushare_unit=gpushare_unit)
    summary = summarize(source.snapshot(), settings, time.time(), live_usage(source))
    nodes = [node_named(node, summary.nodes)] if node is not None else list(summary.nodes)
    if output in PROGRAMS:
        emit(nodes[0] if node is not None else summary, output)
        return
    sheet = terminal()
    blocks = [node_lines(entry, sheet, time.time(), wide=output == "wide") for entry in nodes]
    blocks = blocks or [cluster_lines(summary, sheet, "name", wide=False)]
    say(*[line for block in blocks for line in ("", *block)][1:])
