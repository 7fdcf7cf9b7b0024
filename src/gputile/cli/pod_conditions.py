"""A pod with its conditions, which commands show and the scheduler does not read."""

import msgspec

from gputile.dialects.kube_objects import Pod, PodStatus


class Condition(msgspec.Struct, frozen=True, rename="camel"):
    """One entry of `status.conditions`."""

    type: str | None = None
    status: str | None = None
    message: str | None = None
    last_transition_time: str | None = None


class StatusWithConditions(PodStatus, frozen=True, rename="camel"):
    """The `status` of a Pod, with its conditions."""

    conditions: tuple[Condition, ...] | None = None


class PodWithConditions(Pod, frozen=True):
    """A pod with its conditions; the scheduler itself does without them."""

    status: StatusWithConditions | None = None

    @property
    def bound_at(self) -> str:
        """When the API server bound it, as it writes times; "" when unknown."""
        conditions = (self.status and self.status.conditions) or ()
        return next((c.last_transition_time or "" for c in conditions if c.type == "PodScheduled"), "")
