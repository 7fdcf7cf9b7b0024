"""`gputile agent` on a machine of the tests, deployed as deploy/agent.yaml says: its rights, its token, its settings.

Room:  a real process beside a real kubelet. Its driver is a stub: cards of the test's making, behind NVIDIA's binding.
Door:  `rights(plane)` once per control plane; `with NodeAgent(machine, cards) as agent:`, `agent.hardware`, `kill`.
"""

import os
import signal
import sys
from collections.abc import Mapping
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Self

import yaml

from tests.e2e.api import Manifest, manifests_of
from tests.e2e.configs import write
from tests.e2e.control_plane import ControlPlane
from tests.e2e.gputile import DAY, DEPLOY, RIGHTS
from tests.e2e.machines import Machine
from tests.e2e.processes import Child, free_port, wait_until
from tests.nvml.stub import StubCard, StubCards, build, environment

ACCOUNT, NAMESPACE = "gputile-agent", "kube-system"
A100, T4 = "NVIDIA A100-SXM4-80GB", "Tesla T4"


def rights(plane: ControlPlane) -> None:
    """The rights of deploy/agent.yaml, exactly as written."""
    for manifest in manifests_of(DEPLOY / "agent.yaml"):
        if manifest["kind"] in RIGHTS:
            plane.kube.apply(manifest)


def two_models(name: str, each: int = 4) -> StubCards:
    """Cards of two models, half of them each, with UUIDs that name the machine."""
    models = [(A100, 81920)] * each + [(T4, 15360)] * each
    return StubCards(
        [
            StubCard(f"GPU-{name}-{n}", model, memory, minor=n, pci=f"0000:{16 + n:02x}:00", mig=False, ecc=0)
            for n, (model, memory) in enumerate(models)
        ]
    )


class NodeAgent:
    """One `gputile agent`; the node has its cards when the `with` begins."""

    patience = 30.0  # seconds until the node shows its devices

    def __init__(self, machine: Machine, cards: StubCards, **settings: Any) -> None:
        """`settings` by their dotted names with `__` for the dot: `health__probation=2`."""
        self.machine, self.plane, self.cards = machine, machine.plane, cards
        self._sets = {key.replace("__", "."): value for key, value in settings.items()}
        self.port = free_port()
        self._hardware = machine.disk.folder / "hardware"
        self.child: Child

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.child.stop()

    def start(self, *, wait: bool = True) -> None:
        self.hardware(self.cards)
        driver = build(self.machine.disk.folder / "driver")
        env = environment(driver, self._hardware)
        self.child = self.machine.run("agent", self._argv(), {**env, "NODE_NAME": self.machine.name})
        if wait:
            wait_until(self.serves, self.patience, f"{self.machine.name} offers its cards", [self.child])

    def hardware(self, cards: StubCards) -> None:
        """From now on these are the machine's cards."""
        self.cards = cards
        cards.write(self._hardware)

    def serves(self) -> bool:
        """Whether the node offers devices and says what cards it has."""
        node = self.plane.kube.get("Node", self.machine.name)
        offered = int(node["status"].get("allocatable", {}).get("gputile.io/gpu", "0"))
        return bool(offered and "gputile.io/inventory" in node["metadata"].get("annotations", {}))

    def offered(self, resource: str = "gputile.io/gpu") -> int:
        node = self.plane.kube.get("Node", self.machine.name)
        return int(node["status"].get("allocatable", {}).get(resource, "0"))

    def kill(self) -> None:
        """kill -9, of the agent itself."""
        os.kill(self.machine.pid_of(self.child), signal.SIGKILL)
        wait_until(lambda: not self.child.alive, 10, "the agent is dead")

    def count(self, metric: str, **labels: str) -> float:
        """The sum of all samples of a metric that carry these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = self._get("/metrics").splitlines()
        found = [line for line in lines if line.startswith((f"{metric}{{", f"{metric} "))]
        return sum(float(line.rpartition(" ")[2]) for line in found if all(pair in line for pair in wanted))

    def is_healthy(self) -> bool:
        return self._get("/healthz") == "ok\n"

    def _get(self, path: str) -> str:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def _argv(self) -> list[str | Path]:
        document = next(m for m in manifests_of(DEPLOY / "agent.yaml") if m["kind"] == "ConfigMap")
        settings = yaml.safe_load(document["data"]["settings.yaml"])
        settings["listen"] = f"127.0.0.1:{self.port}"
        config = write(self.machine.disk.folder / "agent.yaml", settings)
        account = self.plane.kubeconfig(f"agent-{self.machine.name}", self._token())
        sets = [f"--set={name}={value}" for name, value in self._sets.items()]
        program = Path(sys.executable).with_name("gputile")
        return [program, "agent", "--config", config, "--kubeconfig", account, *sets]

    def _token(self) -> str:
        """One that names the node, as the kubelet would get it for a pod there."""
        node = self.plane.kube.get("Node", self.machine.name)
        bound: Mapping[str, str] = {"apiVersion": "v1", "kind": "Node", "name": node["metadata"]["name"]}
        return str(self.plane.kube.token_for(ACCOUNT, NAMESPACE, DAY, bound))


def condition(node: Manifest) -> Manifest:
    """What the agent says of the node."""
    found = [one for one in node["status"].get("conditions", []) if one["type"] == "GputileAgent"]
    return found[0] if found else {}
