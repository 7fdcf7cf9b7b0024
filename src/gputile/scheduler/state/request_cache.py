"""What pods ask for, read once per version of a pod, for the verbs of kube-scheduler.

kube-scheduler sends the whole pod with every verb. The watch's reading serves most of them (`Mirror.waiting`); this
cache serves the rest: pods that the watch has not shown yet, and pods without GPUs, which the mirror does not keep.
"""

from collections import OrderedDict

import msgspec

from gputile.dialects import registry
from gputile.dialects.kube_objects import Pod
from gputile.dialects.settings import DialectSettings
from gputile.model.refusals import BadRequest
from gputile.model.requests import PodRequest
from gputile.scheduler.state.cluster_state import is_same

PODS = 64  # kube-scheduler has few pods in hand at a time, and one may weigh half a megabyte


class CachedRequest(msgspec.Struct, frozen=True):
    """A pod, the settings it was read with, and what it asks for."""

    pod: Pod
    settings: DialectSettings
    asked: PodRequest | BadRequest | None


class RequestCache:
    """The requests of the pods that verbs were last called with, by UID and resourceVersion."""

    def __init__(self, size: int = PODS) -> None:
        self._size = size
        self._readings: OrderedDict[tuple[str, str], CachedRequest] = OrderedDict()

    def read(self, pod: Pod, settings: DialectSettings) -> PodRequest | BadRequest | None:
        """What `speaking.read_pod` says. A body that repeats a UID and resourceVersion with another spec, annotations
        or labels is read anew: the API server never sends one, but a caller of the verbs might."""
        version = pod.metadata.resource_version if pod.metadata else None
        if not pod.uid or not version:
            return registry.read_pod(pod, settings)
        key = pod.uid, version
        known = self._readings.get(key)
        if known is None or known.settings is not settings or not is_same(known.pod, pod):
            known = self._readings[key] = CachedRequest(pod, settings, registry.read_pod(pod, settings))
        self._readings.move_to_end(key)
        if len(self._readings) > self._size:
            self._readings.popitem(last=False)
        return known.asked
