"""What processes use of each card, against what their pods were granted.

Room:  a process is its pod's by its control group, which names the pod, or the container that the runtime knows. Both
       need the host's process numbers (hostPID). A process that belongs to no pod of ours is nobody's over-use.
Door:  `used_by_pods` for the processes of one card, then `over_use`.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from gputile.agent.residents import Resident
from gputile.model.units import MiB
from gputile.nvml.values import Process

POD = re.compile(r"pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12})")
CONTAINER = re.compile(r"[0-9a-f]{64}")


class OverUse(msgspec.Struct, frozen=True):
    """A pod that takes more memory of a card than it was granted."""

    pod: Resident
    card: str  # UUID
    used: MiB
    granted: MiB

    @property
    def sentence(self) -> str:
        what = f"{self.granted} MiB" if self.granted else "nothing"
        return f"its processes use {self.used} MiB of card {self.card}, of which it was granted {what}"


def over_use(residents: Iterable[Resident], used: Mapping[tuple[str, str], MiB], allowance: MiB) -> list[OverUse]:
    """`used`: by pod UID and card. `allowance`: the driver's own memory for each context is nobody's fault."""
    found = []
    by_uid = {one.pod.uid: one for one in residents}
    for (uid, card), memory in sorted(used.items()):
        one = by_uid.get(uid)
        if one is None or one.grant is None:
            continue
        use = one.grant.uses().get(card)
        granted = use.memory if use is not None else 0
        if memory > granted + (allowance if granted else 0):
            found.append(OverUse(one, card, memory, granted))
    return found


def used_by_pods(
    card: str, processes: Iterable[Process], containers: Mapping[str, str], proc: Path
) -> dict[tuple[str, str], MiB]:
    """By pod UID and card. `containers`: by container ID the UID of its pod, as the runtime says."""
    found: dict[tuple[str, str], MiB] = {}
    for process in processes:
        uid = pod_of(process.pid, containers, proc)
        if uid and process.memory is not None:
            found[uid, card] = found.get((uid, card), 0) + process.memory
    return found


def pod_of(pid: int, containers: Mapping[str, str], proc: Path) -> str:
    """The UID of the pod whose process this is; "" when it is nobody's, or gone."""
    try:
        groups = (proc / str(pid) / "cgroup").read_text()
    except OSError:
        return ""
    named = POD.search(groups)
    if named:
        return named[1].replace("_", "-")
    return next((containers[one] for one in CONTAINER.findall(groups) if one in containers), "")
