"""What processes use of each card: whose they are, what that adds up to, and who takes more than was granted.

Room:  a process is its container's by its control group, which names the pod, the container, or both. That needs the
       host's process numbers (hostPID). What belongs to no pod that we know is nobody's use; nothing is guessed.
Door:  `look` asks the driver; `usage` and `by_pod` add up what it said; `over_use` compares.
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
    owner: RunningContainer | None = None  # None: nobody's, as far as we know


class MemoryOveruse(msgspec.Struct, frozen=True):
    """A pod that takes more memory of a card than it was granted."""

    pod: NodePod
    card: str  # UUID
    used: MiB
    granted: MiB

    @property
    def sentence(self) -> str:
        what = f"{self.granted} MiB" if self.granted else "nothing"
        return f"its processes use {self.used} MiB of card {self.card}, of which it was granted {what}"


def look(
    driver: Driver,
    cards: Iterable[str],
    containers: Mapping[str, RunningContainer],
    pods: Collection[str],
    proc: Path = PROC,
) -> dict[str, list[ProcessShare]]:
    """Every process on these cards (UUIDs), by card; a card that does not answer is left out.

    `containers`: by ID, as the runtime says. `pods`: UIDs of the node's pods. Blocks, and may raise `NoDriver`.
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
    """Whose process this is; without the container's name where only the pod is certain. None: nobody's, or gone."""
    try:
        groups = (proc / str(pid) / "cgroup").read_text(errors="replace")
    except OSError:
        return None
    named = POD.search(groups)  # the outermost, where a pod runs containers of its own
    pod = named[1].replace("_", "-") if named else ""
    known = next((containers[one] for one in CONTAINER.findall(groups) if one in containers), None)
    if known is not None:
        return known if pod in ("", known.pod) else None  # runtime and control group contradict each other
    return RunningContainer(pod) if pod in pods else None


def usage(parts: Iterable[ProcessShare]) -> Usage:
    """What each container uses of each card."""
    found: dict[tuple[RunningContainer, str], list[CardUsage]] = {}
    for part in parts:
        if part.owner is not None:
            found.setdefault((part.owner, part.card), []).append(part.used)
    sums: Usage = {}
    for (owner, card), used in found.items():
        sums.setdefault(owner.pod, {}).setdefault(owner.container, {})[card] = together(used)
    return sums


def by_pod(parts: Iterable[ProcessShare]) -> dict[tuple[str, str], MiB]:
    """By pod UID and card: the memory that is known to be used, which may not be all."""
    found: dict[tuple[str, str], MiB] = {}
    for part in parts:
        if part.owner is not None and part.used.memory is not None:
            at = part.owner.pod, part.card
            found[at] = found.get(at, 0) + part.used.memory
    return found


def over_use(node_pods: Iterable[NodePod], used: Mapping[tuple[str, str], MiB], allowance: MiB) -> list[MemoryOveruse]:
    """`used`: by pod UID and card. `allowance`: the driver's own memory for each context is nobody's fault."""
    found = []
    by_uid = {one.pod.uid: one for one in node_pods}
    for (uid, card), memory in sorted(used.items()):
        one = by_uid.get(uid)
        if one is None or one.grant is None:
            continue
        use = one.grant.uses().get(card)
        granted = use.memory if use is not None else 0
        if memory > granted + (allowance if granted else 0):
            found.append(MemoryOveruse(one, card, memory, granted))
    return found
