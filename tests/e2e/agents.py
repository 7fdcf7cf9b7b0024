"""`gputile agent` on a machine of the tests, with the RBAC, the token and the settings of deploy/agent.yaml.

The agent is a real process beside a real kubelet; only its NVML driver is a stub with cards that the test defines.
Call `rights(plane)` once per control plane.
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
    """Apply the RBAC of deploy/agent.yaml, exactly as written."""
    for manifest in manifests_of(DEPLOY / "agent.yaml"):
        if manifest["kind"] in RIGHTS:
            plane.kube.apply(manifest)


def two_models(name: str, each: int = 4) -> StubCards:
    """Stub cards of two models, `each` of both, with UUIDs that name the machine."""
    models = [(A100, 81920)] * each + [(T4, 15360)] * each
    return StubCards(
        [
            StubCard(f"GPU-{name}-{n}", model, memory, minor=n, pci=f"0000:{16 + n:02x}:00", mig=False, ecc=0)
            for n, (model, memory) in enumerate(models)
        ]
    )


class NodeAgent:
    """One `gputile agent`; its node offers devices when the `with` begins."""

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
            wait_until(self.serves, self.patience, f"{self.machine.name} offers its devices", [self.child])

    def hardware(self, cards: StubCards) -> None:
        """Replace the cards that the stub driver reports."""
        self.cards = cards
        cards.write(self._hardware)

    def serves(self) -> bool:
        """Whether the node has allocatable devices and an inventory annotation."""
        node = self.plane.kube.get("Node", self.machine.name)
        offered = int(node["status"].get("allocatable", {}).get("gputile.io/gpu", "0"))
        return bool(offered and "gputile.io/inventory" in node["metadata"].get("annotations", {}))

    def offered(self, resource: str = "gputile.io/gpu") -> int:
        node = self.plane.kube.get("Node", self.machine.name)
        return int(node["status"].get("allocatable", {}).get(resource, "0"))

    def kill(self) -> None:
        """Send SIGKILL to the agent itself."""
        os.kill(self.machine.pid_of(self.child), signal.SIGKILL)
        wait_until(lambda: not self.child.alive, 10, "the agent is dead")

    def count(self, metric: str, **labels: str) -> float:
        """The sum of all samples of a metric that carry these labels."""
        pairs = [f'{key}="{value}"' for key, value in labels.items()]
        lines = self._get("/metrics").splitlines()
        samples = [line for line in lines if line.startswith((f"{metric}{{", f"{metric} "))]
        return sum(float(line.rpartition(" ")[2]) for line in samples if all(pair in line for pair in pairs))

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
        """A ServiceAccount token bound to the node, as the kubelet requests it for a pod there."""
        node = self.plane.kube.get("Node", self.machine.name)
        bound: Mapping[str, str] = {"apiVersion": "v1", "kind": "Node", "name": node["metadata"]["name"]}
        return str(self.plane.kube.token_for(ACCOUNT, NAMESPACE, DAY, bound))


def condition(node: Manifest) -> Manifest:
    """The Node condition that the agent writes; empty without one."""
    conditions = [it for it in node["status"].get("conditions", []) if it["type"] == "GputileAgent"]
    return conditions[0] if conditions else {}
