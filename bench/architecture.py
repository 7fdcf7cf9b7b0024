"""The picture of docs/architecture.md: the processes, and the calls between them. Plain SVG, written line by line.

make pictures         writes docs/architecture.svg
"""

from pathlib import Path
from xml.sax.saxutils import escape

import click

SIZE = (1080, 640)
STYLE = """
  text { font-family: system-ui, "DejaVu Sans", sans-serif; font-size: 14px; fill: #1f2328 }
  .title { font-weight: bold; font-size: 15px }
  .small { font-size: 12.5px; fill: #57606a }
  .page { fill: #ffffff; stroke: #d0d7de }
  .zone { fill: #f6f8fa; stroke: #afb8c1; stroke-dasharray: 6 4 }
  .ours { fill: #dafbe1; stroke: #1a7f37; stroke-width: 1.6 }
  .theirs { fill: #ddf4ff; stroke: #0969da; stroke-width: 1.2 }
  .line { fill: none; stroke: #57606a; stroke-width: 1.6 }
  .head { fill: #57606a }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .small { fill: #9da7b3 }
    .page { fill: #0d1117; stroke: #30363d }
    .zone { fill: #161b22; stroke: #484f58 }
    .ours { fill: #12361f; stroke: #3fb950 }
    .theirs { fill: #10253f; stroke: #58a6ff }
    .line { stroke: #9da7b3 }
    .head { fill: #9da7b3 }
  }
"""


@click.command()
def main() -> None:
    """Draw the picture of docs/architecture.md."""
    path = Path(__file__).parents[1] / "docs" / "architecture.svg"
    path.write_text(picture())
    print(f"wrote {path.name}")


def picture() -> str:
    width, height = SIZE
    parts = [f'<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10"/>']
    parts += [*zones(), *boxes(), *arrows(), *legend()]
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" aria-label="The processes of gputile and the calls between them">\n'
        f"<style>{STYLE}</style>\n"
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
        'orient="auto-start-reverse"><path class="head" d="M0 0 L10 5 L0 10 z"/></marker></defs>\n'
        f"{body}\n</svg>\n"
    )


def zones() -> list[str]:
    return [
        rect("zone", 20, 20, 310, 550),
        text(175, 44, "control plane", "small"),
        rect("zone", 730, 20, 330, 550),
        text(895, 44, "each GPU node", "small"),
    ]


def boxes() -> list[str]:
    return [
        *box("theirs", 50, 60, 250, 60, "kube-scheduler"),
        *box("ours", 50, 240, 250, 90, "gputile scheduler", "leader: ledger, quota,", "preemption, metrics API"),
        *box("ours", 50, 430, 250, 70, "gputile scheduler", "standby: watches, does not write"),
        *box("theirs", 465, 60, 130, 510, "API server", "pods, nodes,", "Leases,", "ConfigMaps"),
        *box("ours", 760, 60, 270, 70, "gputile agent", "GPUs by NVML, health, CDI specs"),
        *box("theirs", 760, 270, 270, 60, "kubelet"),
        *box("theirs", 760, 400, 270, 60, "container runtime"),
        *box("theirs", 790, 505, 210, 45, "container with its GPUs"),
    ]


def arrows() -> list[str]:
    return [
        # kube-scheduler calls the leader; the leader writes.
        *arrow((140, 120), (140, 238), "1 filter", at=(108, 175)),
        *arrow((210, 120), (210, 238), "2 bind", at=(244, 175)),
        text(222, 195, "also preempt", "small", "start"),
        *arrow((463, 78), (302, 78), "watch", at=(397, 71)),
        *arrow((302, 258), (463, 258), "3 Binding + grant", at=(397, 251)),
        *arrow((463, 288), (302, 288), "watch", at=(397, 281)),
        *arrow((302, 318), (463, 318), "Lease", at=(397, 311), both=True),
        *arrow((463, 450), (302, 450), "watch", at=(397, 443)),
        *arrow((302, 480), (463, 480), "Lease", at=(397, 473), both=True),
        # The node.
        *arrow((597, 78), (758, 78), "watch (grants)", at=(662, 71)),
        *arrow((758, 112), (597, 112), "inventory, Lease", at=(662, 105)),
        *arrow((597, 300), (758, 300), "4 watch (pods)", at=(662, 293)),
        *arrow((860, 268), (860, 132), "5 Allocate", at=(814, 205)),
        *arrow((880, 268), (880, 132), "6 PreStartContainer", at=(962, 205)),
        *arrow((895, 330), (895, 398), "8 create (CRI)", at=(830, 370)),
        *route("M1030 95 H1046 V430 H1032", "7 CDI spec", at=(985, 370)),
        *arrow((895, 460), (895, 503)),
    ]


def legend() -> list[str]:
    return [
        rect("ours", 40, 592, 22, 22, 4),
        text(70, 608, "gputile", anchor="start"),
        rect("theirs", 150, 592, 22, 22, 4),
        text(180, 608, "Kubernetes", anchor="start"),
        text(300, 608, "Numbers: a pod's path, from filter to its container. An arrow points where", "small", "start"),
        text(300, 625, "the call, or the data of a watch, goes.", "small", "start"),
    ]


def box(kind: str, x: int, y: int, width: int, height: int, title: str, *lines: str) -> list[str]:
    top = y + height / 2 - 9 * len(lines) + 5 if height < 200 else y + 215
    middle = x + width / 2
    return [
        rect(kind, x, y, width, height),
        text(middle, top, title, "title"),
        *(text(middle, top + 18 * row, line, "small") for row, line in enumerate(lines, start=1)),
    ]


def arrow(
    start: tuple[int, int], end: tuple[int, int], label: str = "", *, at: tuple[int, int] = (0, 0), both: bool = False
) -> list[str]:
    return route(f"M{start[0]} {start[1]} L{end[0]} {end[1]}", label, at=at, both=both)


def route(path: str, label: str, *, at: tuple[int, int], both: bool = False) -> list[str]:
    ends = ' marker-start="url(#head)"' * both + ' marker-end="url(#head)"'
    line = f'<path class="line" d="{path}"{ends}/>'
    return [line, text(*at, label)] if label else [line]


def rect(kind: str, x: float, y: float, width: float, height: float, radius: int = 8) -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}"/>'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


if __name__ == "__main__":
    main()
