"""Measures gputile with a real kube-scheduler: `make bench-scheduler`, docs/performance.md.

    make bench-scheduler                                                all of it, about an hour on two cores
    make bench-scheduler ARGS="--nodes 1000 --rounds 2 --pods 1000 --variants none,gputile"
    make bench-scheduler ARGS="--only waiting,latency"

Sections (`--only`): `rates` pods per second against no extender; `waiting` the same beside 1,000 pods that fit nowhere;
`latency` of filter over HTTP; `size` memory and time to ready at 5,000 nodes and 30,000 pods; `freed` from a freed tile
to the binding of a pending pod. Needs the programs of `make e2e` (built once), and an otherwise idle machine.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec
from tests.e2e.control_plane import ControlPlane
from tests.e2e.gputile import rights
from tests.e2e.programs import Programs, programs

from bench import freed as freed_tiles
from bench import pending_pods, sizes
from bench import rates as rate_bench
from bench.harness import join_nodes, progress
from bench.rates import VARIANTS

SECTIONS = ("rates", "waiting", "latency", "size", "freed")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command line."""

    nodes: tuple[int, ...]
    percentage: tuple[int, ...]
    pods: int
    rounds: int
    variants: tuple[str, ...]
    waiting: int
    bound: int
    plain: bool
    profile: bool


def known_values(known: tuple[str, ...]) -> Callable[[click.Context, click.Parameter, str], tuple[str, ...]]:
    """A comma-separated list of known values."""

    def read(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
        values = tuple(item.strip() for item in value.split(",") if item.strip())
        if unknown := [item for item in values if item not in known]:
            raise click.BadParameter(f"{unknown[0]!r} is unknown; choose from {', '.join(known)}")
        return values

    return read


def numbers(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """A comma-separated list of numbers."""
    try:
        return tuple(int(number) for number in value.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is not a list of numbers; write e.g. 1000,5000") from error


@click.command()
@click.option(
    "--only", default=",".join(SECTIONS), show_default=True, callback=known_values(SECTIONS), help="Sections."
)
@click.option("--nodes", default="1000,5000", show_default=True, callback=numbers, help="Sizes of the cluster.")
@click.option("--percentage", default="100,0", show_default=True, callback=numbers, help="percentageOfNodesToScore.")
@click.option("--pods", default=3_000, show_default=True, help="Per turn.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--variants", default=",".join(VARIANTS), show_default=True, callback=known_values(VARIANTS))
@click.option("--waiting", default=1_000, show_default=True, help="Pods that fit nowhere, in section waiting.")
@click.option("--bound", default=30_000, show_default=True, help="Pods of the cluster in section size.")
@click.option("--plain", is_flag=True, help="HTTP between kube-scheduler and gputile; deploy/ and the default: HTTPS.")
@click.option("--profile", is_flag=True, help="Profile gputile's process, and print the most expensive functions.")
@click.option("--save", type=click.Path(path_type=Path, dir_okay=False), help="Write all results as JSON.")
def main(only: tuple[str, ...], save: Path | None, **options_by_name: Any) -> None:
    options = Options(**options_by_name)
    built, results = programs(progress), {}
    measure: dict[str, Callable[[Programs, Options], Any]] = {
        "rates": rates,
        "waiting": waiting,
        "latency": latency,
        "size": size,
        "freed": freed,
    }
    for section in only:
        results[section] = measure[section](built, options)
        if save:
            save.write_bytes(msgspec.json.format(msgspec.json.encode(results)))


def rates(built: Programs, options: Options) -> list[rate_bench.Row]:
    rows: list[rate_bench.Row] = []
    for nodes in options.nodes:
        with ControlPlane(built) as plane:
            rights(plane)
            join_nodes(plane.kube, nodes)
            for percentage in options.percentage:
                plan = rate_bench.Plan(
                    nodes=nodes,
                    percentage=percentage,
                    pods=options.pods,
                    rounds=options.rounds,
                    variants=options.variants,
                    plain=options.plain,
                    profile=options.profile,
                )
                rows += rate_bench.rows(plan, rate_bench.rates(plane, plan))
                show(rate_bench.lines(rows))
    return rows


def waiting(built: Programs, options: Options) -> list[Any]:
    """At the smaller size; kube-scheduler's own work per attempt grows with the nodes."""
    with ControlPlane(built) as plane:
        nodes = join_nodes(plane.kube, min(options.nodes))
        pending_pods.bind_existing_pods(plane, nodes)
        rights(plane)
        cost = pending_pods.filter_cost(plane, nodes)
        show(cost.lines())
        rate = pending_pods.rate_beside_pending(plane, options.waiting, options.pods, options.rounds)
        show([*rate.lines(), *pending_pods.share_lines(cost, rate)])
    return [cost, rate]


def latency(built: Programs, options: Options) -> list[sizes.Latency]:
    with ControlPlane(built) as plane:
        latencies = sizes.latencies(plane, (100, *options.nodes))
    show(sizes.latency_lines(latencies))
    return latencies


def size(built: Programs, options: Options) -> sizes.Large:
    with ControlPlane(built) as plane:
        measured = sizes.large(plane, join_nodes(plane.kube, max(options.nodes)), options.bound)
    show(measured.lines())
    return measured


def freed(built: Programs, options: Options) -> freed_tiles.Freed:
    with ControlPlane(built) as plane:
        rights(plane)
        measured = freed_tiles.freed(plane)
    show(measured.lines())
    return measured


def show(lines: list[str]) -> None:
    print("\n".join(["", *lines, ""]), flush=True)


if __name__ == "__main__":
    main()
