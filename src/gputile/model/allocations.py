"""What a pod holds of a node: its grant, and its CPU and memory."""

import msgspec

from gputile.model.grants import Grant, Use
from gputile.model.units import MiB, Millicores


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """A pod and what it holds of its node; without a grant, only CPU and memory."""

    pod: str  # UID
    node: str
    name: str = ""  # namespace/name, for people
    grant: Grant | None = None
    cpu: Millicores = 0
    memory: MiB = 0
    priority: int = 0
    started: float = 0.0

    def uses(self) -> dict[str, Use]:
        return dict(self.grant.uses()) if self.grant is not None else {}

    @property
    def unplaced(self) -> int:
        """GPUs of the node that it holds besides, where it is unknown which."""
        return self.grant.unplaced if self.grant is not None else 0
