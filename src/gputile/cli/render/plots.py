"""Plots of simulations; needs `gputile[plots]`."""

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # no screen
import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray

from gputile.sim.replay import ReplayRun

Floats = NDArray[np.float64]


def plot_runs(rows: dict[str, list[ReplayRun]], path: Path) -> None:
    """Allocation and fragmentation against arrived load, the mean over seeds with its spread."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    last = max(run.curve[-1].arrived for runs in rows.values() for run in runs)
    loads = np.linspace(0, last, 200)
    for name, runs in rows.items():
        for axes, field in ((left, "allocated"), (right, "fragment")):
            curves = np.array([_on(loads, run, field) for run in runs])
            (line,) = axes.plot(loads, curves.mean(axis=0), label=name, linewidth=1.6)
            axes.fill_between(loads, curves.min(axis=0), curves.max(axis=0), color=line.get_color(), alpha=0.2)
    left.plot([0, 100], [0, 100], color="grey", linewidth=0.8, linestyle=":", label="no pod refused")
    begins = min(0.55 * last, 70.0)  # below, nearly every pod fits and all curves coincide
    top = max(101.0, *(point.allocated + 1 for runs in rows.values() for run in runs for point in run.curve))
    left.set(ylabel="GPU allocated, % of capacity", title="Allocation", ylim=(begins, top), xlim=(begins, last))
    right.set(ylabel="idle GPU no usual pod can use, % of capacity", title="Fragmentation", xlim=(0, last))
    for axes in (left, right):
        axes.set_xlabel("GPU demand arrived, % of capacity")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _on(loads: Floats, run: ReplayRun, field: str) -> Floats:
    values = [getattr(point, field) for point in run.curve]
    return np.asarray(np.interp(loads, [point.arrived for point in run.curve], values))
