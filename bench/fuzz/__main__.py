"""Send spoilt inputs to everything that reads what others write.

    python -m bench.fuzz                                               all targets, 100,000 bodies to the verbs
    python -m bench.fuzz --target yaml --inputs 5000 --seed 7          one target, fewer inputs, and others
    python -m bench.fuzz --target yaml --seed 7 --only 1234            one of them again, as a finding names it

Targets: verbs (kube-scheduler's bodies), metrics-api, agent-port, kubelet (its messages and checkpoint, the runtime's),
yaml (`gputile read`, `gputile doctor -f`). Ends with 1 on a finding.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import click

from bench.fuzz import agent_port, kubelet, manifests, metrics_api, running, verbs
from bench.fuzz.finding import Finding, Tell, quiet, silent

TARGETS: dict[str, Callable[[], AbstractAsyncContextManager[running.Target]]] = {
    "metrics-api": metrics_api.target,
    "agent-port": agent_port.target,
    "kubelet": kubelet.target,
    "yaml": manifests.target,
}
INPUTS = {"verbs": 100_000, "metrics-api": 50_000, "agent-port": 20_000, "kubelet": 100_000, "yaml": 5_000}


async def fuzzed(name: str, inputs: int, seed: int, *, first: int = 0, tell: Tell = silent) -> list[Finding]:
    if name == "verbs":
        return await verbs.run(inputs, seed, first=first, tell=tell)
    return await running.run(name, TARGETS[name](), inputs, seed, first=first, tell=tell)


@click.command()
@click.option("--target", "targets", multiple=True, type=click.Choice([*INPUTS]), help="Which ones; all by default.")
@click.option("--inputs", "--bodies", type=int, help=f"How many to each. [default: {INPUTS}]")
@click.option("--seed", default=1, show_default=True, help="Which ones.")
@click.option("--only", type=int, help="This one alone.")
def main(targets: tuple[str, ...], inputs: int | None, seed: int, only: int | None) -> None:
    """Send spoilt inputs to everything that reads what others write."""
    found, lines = list[Finding](), []
    for name in targets or INPUTS:
        begun = time.monotonic()
        sent = 1 if only is not None else inputs or INPUTS[name]
        with quiet():
            mine = asyncio.run(fuzzed(name, sent, seed, first=only or 0, tell=click.echo))
        for finding in mine:
            click.echo(finding.text())
        found += mine
        took = time.monotonic() - begun
        lines.append(f"{name:<12} {sent:>8,} inputs of seed {seed} in {took:4.0f} s: {len(mine)} findings")
    click.echo("\n".join(lines))
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
