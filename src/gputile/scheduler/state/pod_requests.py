"""What kube-scheduler's calls ask for: the GPU request of the pod, each version of a pod parsed once; and the search
budget and the seed of a call.

kube-scheduler sends the complete pod with every verb. For most of them the watch has parsed the request before
(`ClusterState.pending`). `RequestCache` is for the rest: pods that the watch has not shown yet, and pods without GPUs,
which `ClusterState` does not keep.
"""

from collections import OrderedDict
from collections.abc import Callable
from zlib import crc32

import msgspec

from gputile.dialects import registry
from gputile.dialects.kube_objects import Pod
from gputile.dialects.settings import DialectSettings
from gputile.engine.search_budget import SearchBudget
from gputile.model.refusals import BadRequest
from gputile.model.requests import PodRequest
from gputile.scheduler.state.cluster_state import ClusterState, is_same

RECENT = 1000  # pods
CACHED_PODS = 64  # kube-scheduler works on few pods at a time, and one may take half a megabyte
CALL_STEPS, CALL_SECONDS = 4000, 0.01  # search budget of one call: kube-scheduler and all other requests wait for it


def call_budget(clock: Callable[[], float]) -> SearchBudget:
    """The search budget of one call."""
    return SearchBudget(CALL_STEPS, CALL_SECONDS, clock)


def seed_of(uid: str) -> int:
    """A seed per pod, so that a replay makes the same random choices."""
    return crc32(uid.encode("utf-8", "replace"))


class PodRequests:
    """The GPU requests of the pods that filter, bind and preempt are called for."""

    def __init__(self, cluster_state: ClusterState) -> None:
        self._cluster_state = cluster_state
        self._recent: OrderedDict[str, Pod] = OrderedDict()  # pods that kube-scheduler knew before our watch did
        self._cache = RequestCache()

    def of(self, pod: Pod) -> PodRequest | BadRequest | None:
        """The pod's request: the one that the watch parsed, if the pod is unchanged since then; None without GPUs."""
        known = self._cluster_state.pending.get(pod.uid)
        if known is not None and is_same(known.pod, pod):
            return known.request
        return self._cache.read(pod, self._cluster_state.settings)

    def remember(self, pod: Pod) -> None:
        """Keep a pod that filter was called for before our watch showed it."""
        self._recent[pod.uid] = pod
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)

    def recent(self, uid: str) -> Pod | None:
        """A pod that was just filtered and that our watch has not shown yet: its bind needs no live lookup."""
        return self._recent.get(uid)


class CachedRequest(msgspec.Struct, frozen=True):
    """A pod, the settings it was parsed with, and its request."""

    pod: Pod
    settings: DialectSettings
    request: PodRequest | BadRequest | None


class RequestCache:
    """The requests of the pods that verbs were last called with, by UID and resourceVersion."""

    def __init__(self, size: int = CACHED_PODS) -> None:
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
