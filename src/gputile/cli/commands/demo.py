"""`gputile demo`: schedules the example pods on an in-memory cluster and explains every decision to a newcomer."""

from collections import Counter
from pathlib import Path

import click
import msgspec

import gputile
from gputile.cli.output import say, say_text, style
from gputile.cli.render.describe import constraint_lines, describe
from gputile.cli.render.gpushare import gpushare_table, summary
from gputile.cli.source import ShownNode
from gputile.dialects import registry
from gputile.dialects.kube_objects import Pod
from gputile.engine.policies.table import POLICIES
from gputile.model.cards import Node
from gputile.model.errors import InputError
from gputile.model.grants import ContainerGrant
from gputile.model.policies import DEFAULT_POLICY
from gputile.model.refusals import BadRequest
from gputile.model.requests import PodRequest
from gputile.model.units import show_memory
from gputile.sim.cluster import MemoryCluster, SubmitOutcome
from gputile.sim.manifests import Workload, load_file
from gputile.text.terminal import bare

WIDTH = 80


EPILOG = """\b
Examples:
  gputile demo
  gputile demo --policy spread          the same pods under another policy
  gputile demo --examples my-folder     your own cluster.yaml and manifests

\b
Exit codes: 0 shown, 2 the examples could not be read (docs/cli.md).
"""


@click.command("demo", epilog=EPILOG)
@click.option(
    "--examples",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder with cluster.yaml and one folder of manifests per dialect. [default: those of gputile]",
)
@click.option(
    "--policy",
    type=click.Choice(sorted(POLICIES)),
    default=DEFAULT_POLICY,
    show_default=True,
    help="How nodes and GPUs are chosen.",
)
def command(examples: Path | None, policy: str) -> None:
    """Schedule the example pods on an in-memory cluster, and explain each decision.

    Schedules the example manifests of every dialect with the production core. Shows the node of each pod and why it was
    chosen, why the remaining pod is pending, and the cluster as `kubectl inspect gpushare` prints it. Needs no
    Kubernetes, and ends by itself.
    """
    folder = examples or examples_folder()
    cluster = MemoryCluster(policy)
    _title("gputile demo")
    _say("An in-memory cluster and the production scheduling core; nothing to clean up afterwards.")
    _title("The cluster")
    for manifest in load_file(folder / "cluster.yaml").nodes:
        _show_node(cluster.add_node(manifest))
    _title("Where each pod runs, and why")
    pending = [outcome for workload in _workloads(folder) for outcome in _submit(cluster, workload)]
    _title("Pending pods, and what would help")
    for outcome in pending:
        _show_pending(outcome)
    cluster.ledger.check()
    _say("Audit: no GPU is allocated beyond its size.", fg="green")
    _title("The cluster as `kubectl inspect gpushare` prints it")
    nodes = [msgspec.convert(node, ShownNode) for node in cluster.nodes.values()]
    pods = [msgspec.convert(pod, Pod) for pod in cluster.pods.values()]
    say_text(summary(gpushare_table(nodes, pods)), nl=False)
    _title("Where to go next")
    _say("gputile read -f pod.yaml      what your own manifests request")
    _say("gputile demo --policy spread  the same pods under another policy")
    _say("gputile scheduler --cluster memory   the extender API, to try with curl")
    _say("docs/architecture.md          processes, guarantees and modules, in reading order")
    _say("examples/                     the manifests of this demo")


def examples_folder() -> Path:
    """Beside the package when installed from a wheel, at the top of the checkout otherwise."""
    package = Path(gputile.__file__).parent
    folder = next((p for p in (package / "examples", package.parents[1] / "examples") if p.is_dir()), None)
    if folder is None:
        raise InputError("the example manifests are not installed; name a folder with --examples")
    return folder


def _workloads(folder: Path) -> list[Workload]:
    """Whole GPUs first, our own dialect last."""
    files = [path for name in reversed(registry.names()) for path in sorted((folder / name).glob("*.yaml"))]
    return [workload for path in files for workload in load_file(path).workloads]


def _submit(cluster: MemoryCluster, workload: Workload) -> list[SubmitOutcome]:
    """Schedule the pods and print the outcome; return the pods that stay pending."""
    outcomes = cluster.submit(workload)
    if not outcomes:
        return []
    first = outcomes[0]
    if isinstance(first.asked, PodRequest):
        head = f"{first.asked.dialect} {workload.kind} {workload.name}"
        _say(f"{style(head, bold=True)}: {_requested(first.asked)}")
    for outcome in outcomes:
        _show_outcome(outcome)
    return [outcome for outcome in outcomes if outcome.grant is None and outcome.asked is not None]


# ---- printing -------------------------------------------------------------------------------------------------------


def _title(text: str) -> None:
    say()
    say(style(text, fg="cyan", bold=True))


def _say(text: str, indent: int = 2, fg: str | None = None) -> None:
    for number, line in enumerate(_wrapped(text, WIDTH - indent - 2)):
        line = " " * (indent + 2 * bool(number)) + line
        say(style(line, fg=fg) if fg else line)


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of at most that width; colours do not count, and runs of spaces are kept."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if len(bare(longer)) > width and lines[-1].strip():
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _requested(request: PodRequest) -> str:
    return "; ".join(describe(ask) for ask in request.asks if ask.cards)


def _show_node(node: Node) -> None:
    kinds = Counter((card.model, card.memory) for card in node.cards)
    cards = ", ".join(f"{count} x {model} ({show_memory(memory)})" for (model, memory), count in kinds.items())
    _say(f"{node.name:<10}{cards}")


def _show_outcome(outcome: SubmitOutcome) -> None:
    name = outcome.pod.partition("/")[2]
    if outcome.asked is None:
        _say(f"{name}: requests no GPU", indent=4)
        return
    if outcome.grant is None:
        _say(f"{name}: {style('pending', fg='yellow')}, see below", indent=4)
        return
    containers = outcome.grant.containers
    tiles = "; ".join(_tiles(container, len(containers) > 1) for container in containers)
    _say(f"{name} -> {style(outcome.grant.node, fg='green')}, {tiles}", indent=4)
    _say(f"{_why(outcome)}", indent=6)


def _tiles(container: ContainerGrant, named: bool) -> str:
    gpus = ",".join(str(tile.index) for tile in container.tiles)
    tile = container.tiles[0]
    cores = f" and {tile.cores} % of the cores" if tile.cores else ""
    label = f"{container.container}: " if named else ""
    return f"{label}GPU {gpus}: {show_memory(tile.memory)}{cores}{' each' if len(container.tiles) > 1 else ''}"


def _why(outcome: SubmitOutcome) -> str:
    if outcome.fitting == 1:
        return "the only feasible node"
    return f"{POLICIES[outcome.policy].chosen} of {outcome.fitting} feasible nodes ({outcome.policy})"


def _show_pending(outcome: SubmitOutcome) -> None:
    _say(style(outcome.pod, bold=True))
    if isinstance(outcome.asked, BadRequest):
        _say(f"The request is invalid: {outcome.asked.message}", indent=4)
    if isinstance(outcome.asked, PodRequest):
        wanted = "; ".join([_requested(outcome.asked), *constraint_lines(outcome.asked.constraints)])
        _say(f"It requests {wanted}. It stays pending, because no node fits:", indent=4)
    if outcome.explanation is not None:
        for line in outcome.explanation.lines():
            _say(line.strip(), indent=4 if not line.startswith(" ") else 6)
