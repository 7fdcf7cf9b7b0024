"""Measures the memory of the agent: with 8 GPUs, registered with a kubelet, at rest and after 200 containers.

The agent is the real process on a real API server with the stub driver of the tests; the kubelet is the scripted one.
"""

import asyncio
import sys
import tempfile
import time
from pathlib import Path

import click
from tests.e2e.agents import ACCOUNT, NAMESPACE, rights
from tests.e2e.control_plane import ControlPlane
from tests.e2e.gputile import rights as scheduler_rights
from tests.e2e.nodes import join, plain_node
from tests.e2e.processes import Child, wait_until
from tests.e2e.programs import programs
from tests.kubelet.kubelet import ScriptedKubelet
from tests.nvml.stub import StubCards, build, environment

from gputile.kubelet import messages as wire

NODE, GOAL = "bench-node", 60  # MB
CONTAINERS = 200


def resident(child: Child) -> float:
    """Resident memory of the process, MB."""
    lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024 / 1e6


async def measure(plane: ControlPlane, folder: Path, serve: str) -> list[tuple[str, float]]:
    plugins = folder / "plugins"
    plugins.mkdir()
    hardware = folder / "hardware"
    StubCards.of(8).write(hardware)
    token = plane.kube.token_for(ACCOUNT, NAMESPACE, 3600, {"apiVersion": "v1", "kind": "Node", "name": NODE})
    argv: list[str | Path] = [
        Path(sys.executable).with_name("gputile"), "agent", "--node", NODE,
        "--kubeconfig", plane.kubeconfig("bench-agent", token),
        f"--set=folders.plugins={plugins}", f"--set=folders.cdi={folder / 'cdi'}", "--set=cdi=yes",
        "--set=listen=127.0.0.1:0", "--set=runtime=/nowhere", f"--set=serve={serve}",
    ]  # fmt: skip
    sizes = []
    async with ScriptedKubelet(plugins) as kubelet:
        child = plane.run("bench-agent", argv, environment(build(folder / "driver"), hardware))
        await asyncio.to_thread(wait_until, lambda: _published(plane), 30, "the agent has published", [child])
        while not kubelet.registrations:
            await asyncio.sleep(0.05)
        devices = await anext(kubelet.watch())
        await asyncio.sleep(10)  # some health checks, heartbeats and reports
        sizes.append((f"at rest, {len(devices.devices)} devices", resident(child)))
        for n in range(CONTAINERS):
            request = wire.AllocateRequest(containers=[wire.DeviceIds(ids=[devices.devices[n % 80].id])])
            await kubelet.call("Allocate", request, wire.AllocateResponse)
        sizes.append((f"after {CONTAINERS} allocations", resident(child)))
        child.stop()
    return sizes


def _published(plane: ControlPlane) -> bool:
    return "gputile.io/inventory" in plane.kube.get("Node", NODE)["metadata"].get("annotations", {})


@click.command()
@click.option("--serve", default="gputile", show_default=True, help="Dialects to serve, e.g. gputile,vcuda,nano.")
def main(serve: str) -> None:
    """Print the agent's memory, and whether it is below its goal."""
    with ControlPlane(programs()) as plane, tempfile.TemporaryDirectory() as folder:
        scheduler_rights(plane)
        rights(plane)
        join(plane.kube, [plain_node(NODE)])
        start = time.monotonic()
        sizes = asyncio.run(measure(plane, Path(folder), serve))
    for state, size in sizes:
        print(f"agent {state}: {size:.0f} MB")
    worst, took = max(size for _, size in sizes), time.monotonic() - start
    print(f"{'ok   ' if worst < GOAL else 'OVER '} {worst:.0f} MB  (below {GOAL})  in {took:.0f} s")


if __name__ == "__main__":
    main()
