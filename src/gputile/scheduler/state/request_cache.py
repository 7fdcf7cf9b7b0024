"""A cache of parsed GPU requests, one per version of a pod, for the verbs of kube-scheduler.

kube-scheduler sends the complete pod with every verb. For most of them the watch has parsed the request before
(`ClusterState.pending`). This cache is for the rest: pods that the watch has not shown yet, and pods without GPUs,
which `ClusterState` does not keep.
"""

from collections import OrderedDict

import msgspec

from gputile.dialects import registry
from gputile.dialects.kube_objects import Pod
from gputile.dialects.settings import DialectSettings
from gputile.model.refusals import BadRequest
from gputile.model.requests import PodRequest
from gputile.scheduler.state.cluster_state import is_same

PODS = 64  # kube-scheduler works on few pods at a time, and one may take half a megabyte


class CachedRequest(msgspec.Struct, frozen=True):
    """A pod, the settings it was parsed with, and its request."""

    pod: Pod
    settings: DialectSettings
    request: PodRequest | BadRequest | None


class RequestCache:
    """The requests of the pods that verbs were last called with, by UID and resourceVersion."""

    def __init__(self, size: int = PODS) -> None:
        self._size = size
        self._entries: OrderedDict[tuple[str, str], CachedRequest] = OrderedDict()

    def read(self, pod: Pod, settings: DialectSettings) -> PodRequest | BadRequest | None:
        """The result of `registry.read_pod`. A body that repeats a UID and resourceVersion with another spec,
        annotations or labels is parsed again: the API server never sends one, but a caller of the verbs might."""
        version = pod.metadata.resource_version if pod.metadata else None
        if not pod.uid or not version:
            return registry.read_pod(pod, settings)
        key = pod.uid, version
        known = self._entries.get(key)
        if known is None or known.settings is not settings or not is_same(known.pod, pod):
            known = self._entries[key] = CachedRequest(pod, settings, registry.read_pod(pod, settings))
        self._entries.move_to_end(key)
        if len(self._entries) > self._size:
            self._entries.popitem(last=False)
        return known.request
