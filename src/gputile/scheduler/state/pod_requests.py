"""The GPU requests of the pods in kube-scheduler's calls; each version of a pod is parsed once."""

from collections import OrderedDict

from gputile.dialects.kube_objects import Pod
from gputile.model.refusals import BadRequest
from gputile.model.requests import PodRequest
from gputile.scheduler.state.cluster_state import ClusterState, is_same
from gputile.scheduler.state.request_cache import RequestCache

RECENT = 1000  # pods


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
