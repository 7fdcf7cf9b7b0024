"""`gputile top`: allocated and free GPU capacity of the cluster, its nodes and its GPUs; live with -w."""

import time
from typing import Any

import click

from gputile.cli.cluster_summary import ClusterSummary, summarize
from gputile.cli.lookup import complete_node, node_named
from gputile.cli.output import say
from gputile.cli.render.cluster import cluster_lines, node_lines
from gputile.cli.render.terminal import PROGRAMS, emit, output_option, terminal
from gputile.cli.source import ClusterSnapshot, ClusterSource, cluster_options, unit_option
from gputile.cli.usage import live_usage
from gputile.dialects.settings import DialectSettings

EPILOG = """\b
Examples:
  gputile top                        cluster, models and nodes; one character per GPU
  gputile top a100-1                 the GPUs of a node, and the pods on them
  gputile top --sort free            the nodes with most free memory first
  gputile top -w                     the same, live, until ^C
  gputile top -o json | jq .cluster
  kubectl get nodes,pods -A -o json | gputile top -f -

\b
GPUS: · idle, ▁ to █ the allocated part (of memory or cores, whichever is larger), ! out of use.
Exit codes: 0 printed, 2 nodes or pods could not be read (docs/cli.md).
"""

SORTS = ("name", "free", "used", "pods")


@click.command("top", epilog=EPILOG)
@click.argument("node", required=False, shell_complete=complete_node)
@output_option()
@click.option("-w", "--watch", is_flag=True, help="Follow the cluster: print again after every change, until ^C.")
@click.option("--sort", "order", type=click.Choice(SORTS), default="name", show_default=True, help="Order of nodes.")
@unit_option
@cluster_options
def command(
    node: str | None,
    output: str,
    watch: bool,
    order: str,
    gpushare_unit: Any,
    files: tuple[str, ...],
    kubeconfig: str | None,
    context: str | None,
) -> None:
    """Show allocated and free GPU capacity of the cluster, its nodes and its GPUs.

    Adds up what pods hold, from their grants or the records of the system that placed them. Needs the right to list
    nodes and pods, and nothing installed in the cluster.
    """
    source = ClusterSource(kubeconfig=kubeconfig, context=context, files=files)
    settings = DialectSettings(gpushare_unit=gpushare_unit)

    def draw(snapshot: ClusterSnapshot) -> list[str]:
        return render(summarize(snapshot, settings, time.time()), node, output, order)

    if watch:
        from gputile.cli.live_view import keep_drawing

        keep_drawing(source, draw)
        return
    use = live_usage(source) if node is not None else None
    summary = summarize(source.snapshot(), settings, time.time(), use)
    if output in PROGRAMS:
        emit(summary if node is None else node_named(node, summary.nodes), output)
        return
    for line in render(summary, node, output, order):
        say(line)


def render(summary: ClusterSummary, node: str | None, output: str, order: str) -> list[str]:
    """The cluster, or one node of it, as lines of text."""
    sheet = terminal()
    if node is not None:
        return node_lines(node_named(node, summary.nodes), sheet, time.time(), wide=output == "wide")
    return cluster_lines(summary, sheet, order, wide=output == "wide")
