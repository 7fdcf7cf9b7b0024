"""The results of `gputile simulate`: a table, JSON, CSV files and a plot."""

import csv
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gputile.cli.output import say
from gputile.cli.render.terminal import PROGRAMS, emit, table
from gputile.sim.replay import ReplayRun
from gputile.sim.steady_state import SteadyRun


def report_runs(rows: dict[str, list[ReplayRun]], output: str, out: Path | None, *, compares: bool) -> None:
    """One row per policy, or per changed cluster when they are compared."""
    if output in PROGRAMS:
        emit({"rows": [_summary(name, runs) for name, runs in rows.items()]}, output)
    else:
        _print_table([_cells(name, runs, compares) for name, runs in rows.items()])
    if out is not None:
        _write_runs(out, rows)
        _plot(out, rows)


def _summary(name: str, runs: list[ReplayRun]) -> dict[str, Any]:
    return {
        "name": name,
        "policy": runs[0].plan.policy,
        "seeds": [run.plan.seed for run in runs],
        "cards": runs[0].cards,
        "final": _mean_sd([run.final for run in runs]),
        "at_full": _mean_sd([run.at_full for run in runs]),
        "fragment": _mean_sd([run.fragment for run in runs]),
        "first_refusal": _mean_sd([run.first_refusal for run in runs]),
        "allocated_cards": _mean_sd([run.allocated_cards for run in runs]),
        "refused_pods": _mean_sd([float(run.refused) for run in runs]),
        "seconds": _mean_sd([run.seconds for run in runs]),
    }


def _mean_sd(numbers: Sequence[float | None]) -> dict[str, float | None]:
    known = [number for number in numbers if number is not None]
    if not known:
        return {"mean": None, "sd": None}
    return {"mean": statistics.fmean(known), "sd": statistics.stdev(known) if len(known) > 1 else 0.0}


def _cells(name: str, runs: list[ReplayRun], compares: bool) -> dict[str, str]:
    values = _summary(name, runs)
    cells = {
        "policy": name,
        "final %": _show(values["final"]),
        "at 100 %": _show(values["at_full"]),
        "fragment %": _show(values["fragment"], spread=False),
        "first refusal at %": _show(values["first_refusal"], spread=False),
    }
    if compares:  # percentages are of the base cluster, so that rows can be compared
        cells |= {
            "GPUs": str(values["cards"]),
            "allocated": _show(values["allocated_cards"], spread=False),
            "pods refused": _show(values["refused_pods"], spread=False),
        }
    return cells | {"seconds": _show(values["seconds"], spread=False)}


def _show(value: dict[str, float | None], *, spread: bool = True) -> str:
    if value["mean"] is None:
        return "-"
    return f"{value['mean']:.2f} ± {value['sd']:.2f}" if spread else f"{value['mean']:.1f}"


def _print_table(rows: list[dict[str, str]]) -> None:
    header = list(rows[0])
    say(*table(header, [list(row.values()) for row in rows], right=range(1, len(header))))


def _write_runs(out: Path, rows: dict[str, list[ReplayRun]]) -> None:
    fields = ("final", "at_full", "fragment", "first_refusal", "refused", "seconds")
    with (out / "runs.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["row", "policy", "seed", *fields])
        for name, runs in rows.items():
            for run in runs:
                writer.writerow([name, run.plan.policy, run.plan.seed, *(getattr(run, field) for field in fields)])
    with (out / "curves.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["row", "seed", "arrived", "allocated", "fragment"])
        for name, runs in rows.items():
            for run in runs:
                writer.writerows([name, run.plan.seed, p.arrived, p.allocated, p.fragment] for p in run.curve)
    say(f"wrote {out / 'runs.csv'} and {out / 'curves.csv'}", err=True)


def _plot(out: Path, rows: dict[str, list[ReplayRun]]) -> None:
    try:
        from gputile.cli.render.plots import plot_runs
    except ImportError:
        say("no plots: matplotlib is missing; `pip install '.[plots]'` in a checkout installs it", err=True)
        return
    plot_runs(rows, out / "packing.png")
    say(f"wrote {out / 'packing.png'}", err=True)


STEADY = {
    "hours": "hours",
    "turned_over": "turned over %",
    "cards": "GPUs",
    "allocated": "allocated %",
    "waiting": "pending pods",
    "waited_share": "waited %",
    "mean_wait": "mean wait min",
    "p95_wait": "p95 wait min",
    "never_started": "never started",
    "seconds": "seconds",
}


def report_steady(rows: dict[str, list[SteadyRun]], output: str, out: Path | None) -> None:
    """One row per policy, of pods that also end."""
    values = {
        name: {field: _mean_sd([float(getattr(run, field)) for run in runs]) for field in STEADY}
        for name, runs in rows.items()
    }
    if output in PROGRAMS:
        documents = [{"name": name, "policy": rows[name][0].plan.policy, **row} for name, row in values.items()]
        emit({"rows": documents}, output)
    else:
        _print_table(
            [
                {"policy": name, **{STEADY[f]: _show(row[f], spread=f == "allocated") for f in STEADY}}
                for name, row in values.items()
            ]
        )
    if out is not None:
        with (out / "steady.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["row", "policy", "seed", *STEADY])
            for name, runs in rows.items():
                for run in runs:
                    writer.writerow([name, run.plan.policy, run.plan.seed, *(getattr(run, f) for f in STEADY)])
        say(f"wrote {out / 'steady.csv'}", err=True)
