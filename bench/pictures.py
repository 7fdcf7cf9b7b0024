"""Draws the pictures of docs/packing.md: the value of a remainder of a GPU, and stranding.

make pictures         writes docs/worth.png; the mix in it is made up
"""

from pathlib import Path

import click
import matplotlib as mpl

mpl.use("Agg")  # no screen
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from gputile.engine.policies.cutting_stock import prices, values

MIX = {80: 30.0, 65: 10.0, 47: 20.0, 32: 20.0, 23: 20.0}  # share of a GPU in percent, how often it is requested


@click.command()
def main() -> None:
    """Draw the pictures of docs/packing.md."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    draw_worth(left)
    draw_stranding(right)
    path = Path(__file__).parents[1] / "docs" / "worth.png"
    figure.savefig(path, dpi=130)
    print(f"wrote {path.name}")


def draw_worth(axes: Axes) -> None:
    table = values(prices(MIX))
    axes.step(range(101), table, where="post", linewidth=1.8, label="V(r): its value")
    axes.plot([0, 100], [0, 1], color="grey", linestyle=":", label="its size")
    notes = (
        (35, (3, 0.62), "tab:green", "32 beside 65 loses 1/3,\nand is worth 1/3: a good fit"),
        (53, (58, 0.14), "tab:red", "32 beside 47 loses 1/2,\nand is worth 1/3:\na sixth of a GPU is wasted"),
    )
    for r, where, color, text in notes:
        axes.annotate(text, (r, table[r]), where, arrowprops={"arrowstyle": "->"})
        axes.plot([r, r - 32], [table[r], table[r - 32]], "o", color=color)
    names = ", ".join(str(size) for size in MIX)
    axes.set(title=f"A remainder, when pods request {names} %", xlabel="free share r of a GPU, %", ylabel="GPUs")
    axes.legend(frameon=False, loc="upper left")
    axes.grid(alpha=0.3)


def draw_stranding(axes: Axes) -> None:
    """Two nodes with four idle GPUs each: the same pod strands GPUs on one of them."""
    names = ["node with much CPU", "node with little CPU"]
    idle, served = np.array([3, 3]), np.array([3, 1])
    axes.bar(names, served, color="tab:green", label="idle, with enough CPU")
    axes.bar(names, idle - served, bottom=served, color="tab:red", label="stranded")
    axes.bar(names, [1, 1], bottom=idle, color="lightgrey", label="allocated to the pod")
    axes.set(title="After a pod that requests one GPU and much CPU", ylabel="GPUs", ylim=(0, 5.6))
    axes.legend(frameon=False, loc="upper center", ncols=3, fontsize="small", columnspacing=1.0)


if __name__ == "__main__":
    main()
