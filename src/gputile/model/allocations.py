"""What a pod holds of a node: its grant, and its CPU and memory."""

import msgspec

from gputile.model.cards import Use
from gputile.model.grants import Grant
from gputile.model.units import MiB, Millicores


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """What one pod holds of its node. A pod without a grant holds CPU and memory only."""

    pod: str  # UID
    node: str
    name: str = ""  # namespace/name, for messages
    grant: Grant | None = None
    cpu: Millicores = 0
    memory: MiB = 0
    priority: int = 0
    started: float = 0.0

    def uses(self) -> dict[str, Use]:
        """By card UUID: the most that the pod holds of the card at any time."""
        return dict(self.grant.uses()) if self.grant is not None else {}

    @property
    def unplaced(self) -> int:
        """How many more GPUs of the node the pod holds, where it is unknown which ones."""
        return self.grant.unplaced if self.grant is not None else 0
