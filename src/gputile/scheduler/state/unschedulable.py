"""A pod that fits on no node: what filter hands to preemption and to the pod's Events."""

import msgspec

from gputile.dialects.kube_objects import Pod
from gputile.model.refusals import BadRequest
from gputile.model.requests import PodRequest


class UnschedulablePod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod that fitted nowhere, for those who tell it why."""

    pod: Pod
    asked: PodRequest | BadRequest
    names: list[str]  # the nodes that were asked about
