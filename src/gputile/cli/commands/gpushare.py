"""`kubectl inspect gpushare [-d] [node]`: gpushare's own plugin for kubectl, printed to the byte.

The program `kubectl-inspect-gpushare`. Habits of the original that scripts may rely on are kept: errors are
`Failed due to ...` on standard output with exit code 1, and glog's flags are accepted and ignored.
"""

import re
import sys

import click

from gputile import __version__
from gputile.cli.main import handle_output_errors
from gputile.cli.output import say, say_text
from gputile.cli.render.gpushare import details, document, gpushare_table, summary
from gputile.cli.render.terminal import PROGRAMS, emit, output_option
from gputile.cli.source import ClusterSource, cluster_options, warn_fallback
from gputile.dialects.gpushare import MEM
from gputile.model.errors import GputileError, InputError

GLOG = re.compile(r"--?(?:(?:also)?logtostderr|v|vmodule|stderrthreshold|log_dir|log_backtrace_at)(=.*)?$")
SWITCHES = ("logtostderr", "alsologtostderr")  # the flags among them that take no value

EPILOG = """\b
Examples:
  kubectl inspect gpushare                 one line per node
  kubectl inspect gpushare -d              the pods of each node
  kubectl inspect gpushare node-a -d       of one node; flags may come before or after it
  kubectl inspect gpushare -o json | jq '.nodes[] | select(.usedGPU == 0).name'

\b
Shows nodes that share `aliyun.com/gpu-mem`. `kubectl gputile top` shows all GPU nodes.
Exit codes: 0 printed, 1 nodes or pods could not be read, 2 wrong usage.
"""


@click.command("kubectl inspect gpushare", epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("node", required=False)
@click.option("-d", "details_wanted", is_flag=True, help="Details: the pods of each node.")
@output_option()
@click.option(
    "--unit", type=click.Choice(["GiB", "MiB"]), help="Unit of aliyun.com/gpu-mem. [default: guessed from the nodes]"
)
@click.version_option(__version__, prog_name="kubectl-inspect-gpushare")
@cluster_options
def command(
    node: str | None,
    details_wanted: bool,
    output: str,
    unit: str | None,
    files: tuple[str, ...],
    kubeconfig: str | None,
    context: str | None,
) -> None:
    """Show the GPU memory of the nodes that share it, per GPU, as gpushare's own plugin does."""
    snapshot = ClusterSource(kubeconfig=kubeconfig, context=context, files=files).snapshot()
    nodes = [shown for shown in snapshot.nodes if node in (None, shown.name)]
    if not nodes and node is not None:
        raise InputError(f'nodes "{node}" not found')
    table = gpushare_table(nodes, snapshot.pods, unit)
    if output in PROGRAMS:
        emit(document(table), output)
        return
    say_text(details(table) if details_wanted else summary(table), nl=False)
    if not table.rows:
        warn_fallback(f"no node here shares `{MEM}`; `kubectl gputile top` shows the GPUs of all nodes")


def main() -> None:
    handle_output_errors(_main)


def _main() -> None:
    try:
        command(args=without_glog(sys.argv[1:]), prog_name="kubectl inspect gpushare")
    except GputileError as error:
        say(f"Failed due to {error}", nl=False)
        sys.exit(1)


def without_glog(arguments: list[str]) -> list[str]:
    """The arguments without glog's. Go's flags have one dash or two, and their value after `=` or as the next word."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        match = GLOG.match(word)
        if match is None:
            kept.append(word)
        elif match[1] is None and word.lstrip("-") not in SWITCHES:
            next(words, None)
    return kept
