"""Draws the pictures of docs/cli.md: the real output of the commands on a made-up cluster, as in a terminal.

make pictures         writes docs/cli-*.png
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import matplotlib as mpl
import yaml

mpl.use("Agg")  # no screen
import matplotlib.pyplot as plt

from gputile.sim.cluster import MemoryCluster
from gputile.sim.manifests import Workload
from gputile.testing.builders import node, pod

DOCS, DEPLOY = (Path(__file__).parents[1] / folder for folder in ("docs", "deploy"))
COLUMNS = 92
SHOTS = {
    "cli-top.png": ("top",),
    "cli-node.png": ("top", "a100-2"),
    "cli-explain.png": ("explain", "llm-70b", "-n", "research"),
    "cli-doctor.png": ("doctor",),
}
PAPER, INK = "#1e1e24", "#e4e4e4"
COLOURS = {"31": "#ff6b68", "32": "#7ccf6f", "33": "#e8c35d", "36": "#67c6d8"}
DIM = "#6c6c74"
SGR = re.compile(r"\x1b\[([0-9;]*)m")
CELL = (0.0835, 0.192)  # inches: width and height of a character
SIZE = 10  # points


@click.command()
def main() -> None:
    """Draw the pictures of docs/cli.md."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.json"
        file.write_text(json.dumps({"kind": "List", "items": cluster()}))
        for name, argv in SHOTS.items():
            draw(f"gputile {' '.join(argv)}", printed([*argv, "-f", str(file)]), DOCS / name)
            print(f"wrote {name}")


def printed(argv: list[str]) -> str:
    env = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)}
    program = Path(sys.executable).with_name("gputile")
    return subprocess.run([program, *argv], env=env, stdout=subprocess.PIPE, text=True, check=False).stdout


def draw(command: str, text: str, path: Path) -> None:
    lines = [f"\x1b[32m$\x1b[0m {command}", *text.rstrip("\n").split("\n")]
    width, height = (COLUMNS + 2) * CELL[0], (len(lines) + 1) * CELL[1]
    figure = plt.figure(figsize=(width, height), facecolor=PAPER)
    for row, line in enumerate(lines, start=1):
        column = 1
        for style, text_run in runs(line):
            for character in text_run:
                x, y = column * CELL[0] / width, 1 - (row + 0.25) * CELL[1] / height
                if character != " ":
                    figure.text(x, y, character, family="DejaVu Sans Mono", size=SIZE, **style)
                column += 1
    figure.savefig(path, dpi=120, facecolor=PAPER)
    plt.close(figure)


def runs(line: str) -> list[tuple[dict[str, Any], str]]:
    """The pieces of a line that have one style."""
    style: dict[str, Any] = {"color": INK}
    pieces, at = [], 0
    for match in SGR.finditer(line):
        pieces.append((dict(style), line[at : match.start()]))
        for code in match[1].split(";"):
            if code in ("", "0"):
                style = {"color": INK}
            elif code == "1":
                style["weight"] = "bold"
            elif code == "2":
                style["color"] = DIM
            else:
                style["color"] = COLOURS.get(code, INK)
        at = match.end()
    return [*pieces, (style, line[at:])]


# ---- the cluster ----------------------------------------------------------------------------------------------------


def cluster() -> list[dict[str, Any]]:
    memory = MemoryCluster("tiling")
    built = [
        node("a100-1").cards(8, "NVIDIA A100-SXM4-80GB", 81920),
        node("a100-2")
        .cards(7, "NVIDIA A100-SXM4-80GB", 81920)
        .card("NVIDIA A100-SXM4-80GB", 81920, healthy=False, reason="XID 79: the GPU has fallen off the bus"),
        node("l40s-1").cards(4, "NVIDIA L40S", 46068),
        node("l40s-2").cards(4, "NVIDIA L40S", 46068),
        node("t4-1").cards(4, "Tesla T4", 15360),
        node("cpu-1"),
    ]
    for number, builder in enumerate(built, start=11):
        memory.add_node(builder.manifest(f"10.0.0.{number}"))
    for namespace, name, count, limits in (
        ("research", "llm-13b", 2, {"gputile.io/gpu": 4}),
        ("team-a", "serve", 9, {"gputile.io/gpu": 1, "gputile.io/memory": 20000, "gputile.io/cores": 30}),
        ("team-a", "embed", 6, {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 6000, "nvidia.com/gpucores": 20}),
        ("team-b", "notebook", 7, {"aliyun.com/gpu-mem": 5}),
        ("team-b", "train", 3, {"gputile.io/gpu": 1}),
        ("research", "llm-70b", 1, {"gputile.io/gpu": 8}),
    ):
        manifest = pod(limits, name=name, namespace=namespace)
        kind = "Pod" if count == 1 else "Deployment"
        memory.submit(Workload(kind=kind, name=name, namespace=namespace, replicas=count, pod=manifest))
    return [
        *({**manifest, "kind": "Node"} for manifest in memory.nodes.values()),
        *map(_aged, memory.pods.values()),
        *installation([builder.node().name for builder in built]),
    ]


def installation(nodes: list[str]) -> list[dict[str, Any]]:
    """The objects that `doctor` checks: two replicas, an agent without heartbeat, a deleted policy."""
    leader = pod({}, name="gputile-scheduler-7d9f-x2k", namespace="kube-system", labels={"gputile.io/leader": "true"})
    now, policies = datetime.now(UTC), ("gputile-records", "gputile-agents")
    config = (DEPLOY / "kube-scheduler" / "second-scheduler.yaml").read_text()
    data = next(manifest["data"] for manifest in yaml.safe_load_all(config) if manifest["kind"] == "ConfigMap")
    return [
        leader,
        _object("Deployment", "gputile-scheduler", spec={"replicas": 2}, status={"readyReplicas": 2}),
        _object("DaemonSet", "gputile-agent"),
        _object("ConfigMap", "gpu-scheduler", data=data),
        _object("EndpointSlice", "some-webhook"),
        _object("MutatingWebhookConfiguration", "none-for-pods"),
        _lease("gputile-scheduler", now, "kube-system"),
        *(_lease(name, now - timedelta(minutes=9 * (name == "t4-1"))) for name in nodes),
        *(_object("ValidatingAdmissionPolicy", name) for name in policies),
        *(_object("ValidatingAdmissionPolicyBinding", name, spec={"policyName": name}) for name in policies),
    ]


def _object(kind: str, name: str, namespace: str = "kube-system", **more: Any) -> dict[str, Any]:
    return {"kind": kind, "metadata": {"name": name, "namespace": namespace}, **more}


def _lease(name: str, renewed: datetime, namespace: str = "gputile-agents") -> dict[str, Any]:
    renew_time = renewed.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": renew_time}
    return _object("Lease", name, namespace, spec=spec)


def _aged(manifest: dict[str, Any]) -> dict[str, Any]:
    """Add times and a phase, as in a real cluster. The grant's own time is that of the in-memory clock, so it has
    none."""
    created = (datetime.now(UTC) - timedelta(hours=3, minutes=12)).strftime("%Y-%m-%dT%H:%M:%SZ")
    placed = bool(manifest["spec"].get("nodeName"))
    status: dict[str, Any] = {"phase": "Running" if placed else "Pending"}
    if placed:
        status["conditions"] = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": created}]
    return {**manifest, "metadata": {**manifest["metadata"], "creationTimestamp": created}, "status": status}


if __name__ == "__main__":
    main()
