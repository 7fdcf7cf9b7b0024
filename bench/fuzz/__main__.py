"""Send corrupted inputs to every component that parses external input.

    python -m bench.fuzz                                               all targets, 100,000 bodies to the verbs
    python -m bench.fuzz --target yaml --inputs 5000 --seed 7          one target, fewer and other inputs
    python -m bench.fuzz --target yaml --seed 7 --only 1234            reproduce one finding

Targets: verbs (bodies of kube-scheduler), metrics-api, agent-port, kubelet (messages, checkpoint, runtime config),
yaml (`gputile read`, `gputile doctor -f`). Exits with 1 on a finding.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import click

from bench.fuzz import agent_port, fuzz_loop, kubelet, manifests, metrics_api, verbs
from bench.fuzz.finding import Finding, Report, quiet, silent

TARGETS: dict[str, Callable[[], AbstractAsyncContextManager[fuzz_loop.Target]]] = {
    "metrics-api": metrics_api.target,
    "agent-port": agent_port.target,
    "kubelet": kubelet.target,
    "yaml": manifests.target,
}
INPUTS = {"verbs": 100_000, "metrics-api": 50_000, "agent-port": 20_000, "kubelet": 100_000, "yaml": 5_000}


async def fuzzed(name: str, inputs: int, seed: int, *, first: int = 0, report: Report = silent) -> list[Finding]:
    if name == "verbs":
        return await verbs.run(inputs, seed, first=first, report=report)
    return await fuzz_loop.run(name, TARGETS[name](), inputs, seed, first=first, report=report)


@click.command()
@click.option("--target", "targets", multiple=True, type=click.Choice([*INPUTS]), help="Targets; all by default.")
@click.option("--inputs", "--bodies", type=int, help=f"Inputs for each target. [default: {INPUTS}]")
@click.option("--seed", default=1, show_default=True, help="Seed of the inputs.")
@click.option("--only", type=int, help="Send only this input.")
def main(targets: tuple[str, ...], inputs: int | None, seed: int, only: int | None) -> None:
    """Send corrupted inputs to every component that parses external input."""
    all_findings, lines = list[Finding](), []
    for name in targets or INPUTS:
        start_time = time.monotonic()
        sent = 1 if only is not None else inputs or INPUTS[name]
        with quiet():
            findings = asyncio.run(fuzzed(name, sent, seed, first=only or 0, report=click.echo))
        for finding in findings:
            click.echo(finding.text())
        all_findings += findings
        took = time.monotonic() - start_time
        lines.append(f"{name:<12} {sent:>8,} inputs of seed {seed} in {took:4.0f} s: {len(findings)} findings")
    click.echo("\n".join(lines))
    sys.exit(1 if all_findings else 0)


if __name__ == "__main__":
    main()
