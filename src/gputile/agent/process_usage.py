"""Assigns the processes on each card to containers, adds their usage up, and compares it with the grants.

A process belongs to the container that its cgroup names (the pod, the container, or both). That needs the host's PIDs
(hostPID). A process of no known pod is not counted for any; nothing is guessed.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import msgspec

from gputile.agent.node_pods import NodePod
from gputile.kubelet.cri import RunningContainer
from gputile.model.units import MiB
from gputile.model.usage import CardUsage, Usage, together
from gputile.nvml.driver import Driver

POD = re.compile(r"pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12})")
CONTAINER = re.compile(r"[0-9a-f]{64}")
PROC = Path("/proc")


class ProcessShare(msgspec.Struct, frozen=True):
    """What one process uses of one card."""

    card: str  # UUID
    used: CardUsage
    owner: RunningContainer | None = None  # None: of no known pod


class MemoryOveruse(msgspec.Struct, frozen=True):
    """A pod that uses more memory of a card than granted."""

    pod: NodePod
    card: str  # UUID
    used: MiB
    granted: MiB

    @property
    def message(self) -> str:
        granted = f"{self.granted} MiB" if self.granted else "nothing"
        return f"the pod uses {self.used} MiB of GPU {self.card} and was granted {granted} of it"


def sample(
    driver: Driver,
    cards: Iterable[str],
    containers: Mapping[str, RunningContainer],
    pods: Collection[str],
    proc: Path = PROC,
) -> dict[str, list[ProcessShare]]:
    """Every process on these cards (UUIDs), by card; a card that does not answer is left out.

    `containers`: the running ones by ID, from the runtime. `pods`: UIDs of the node's pods. Blocks, and may raise
    `NoDriver`.
    """
    listed = {card: driver.processes(card) for card in cards}
    return {
        card: [
            ProcessShare(card, CardUsage(process.memory, process.cores), owner_of(process.pid, containers, pods, proc))
            for process in processes
        ]
        for card, processes in listed.items()
        if processes is not None
    }


def owner_of(
    pid: int, containers: Mapping[str, RunningContainer], pods: Collection[str], proc: Path
) -> RunningContainer | None:
    """The container of a process; without a name where only the pod is certain. None: of no known pod, or gone."""
    try:
        cgroup = (proc / str(pid) / "cgroup").read_text(errors="replace")
    except OSError:
        return None
    match = POD.search(cgroup)  # the outermost, where a pod runs containers of its own
    pod = match[1].replace("_", "-") if match else ""
    ids = CONTAINER.findall(cgroup)
    known = next((containers[container_id] for container_id in ids if container_id in containers), None)
    if known is not None:
        return known if pod in ("", known.pod) else None  # runtime and cgroup contradict each other
    return RunningContainer(pod) if pod in pods else None


def usage(shares: Iterable[ProcessShare]) -> Usage:
    """What each container uses of each card."""
    by_owner: dict[tuple[RunningContainer, str], list[CardUsage]] = {}
    for share in shares:
        if share.owner is not None:
            by_owner.setdefault((share.owner, share.card), []).append(share.used)
    sums: Usage = {}
    for (owner, card), used in by_owner.items():
        sums.setdefault(owner.pod, {}).setdefault(owner.container, {})[card] = together(used)
    return sums


def by_pod(shares: Iterable[ProcessShare]) -> dict[tuple[str, str], MiB]:
    """The known memory usage by pod UID and card; processes of unknown usage are left out."""
    memory: dict[tuple[str, str], MiB] = {}
    for share in shares:
        if share.owner is not None and share.used.memory is not None:
            key = share.owner.pod, share.card
            memory[key] = memory.get(key, 0) + share.used.memory
    return memory


def over_use(node_pods: Iterable[NodePod], used: Mapping[tuple[str, str], MiB], allowance: MiB) -> list[MemoryOveruse]:
    """`used`: by pod UID and card. `allowance`: the driver's own memory for each context, which no grant includes."""
    overuses = []
    by_uid = {node_pod.pod.uid: node_pod for node_pod in node_pods}
    for (uid, card), memory in sorted(used.items()):
        node_pod = by_uid.get(uid)
        if node_pod is None or node_pod.grant is None:
            continue
        use = node_pod.grant.uses().get(card)
        granted = use.memory if use is not None else 0
        if memory > granted + (allowance if granted else 0):
            overuses.append(MemoryOveruse(node_pod, card, memory, granted))
    return overuses
