"""A pod that fits on no node, as filter hands it over to preemption and to the Events of pending pods."""

import msgspec

from gputile.dialects.kube_objects import Pod
from gputile.model.refusals import BadRequest
from gputile.model.requests import PodRequest


class UnschedulablePod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod that filter rejected on all its candidate nodes."""

    pod: Pod
    request: PodRequest | BadRequest
    names: list[str]  # the candidate nodes
