"""What the pods of kube-scheduler's calls request, read as seldom as possible."""

from collections import OrderedDict

from gputile.dialects.kube_objects import Pod
from gputile.model.refusals import BadRequest
from gputile.model.requests import PodRequest
from gputile.scheduler.state.cluster_state import ClusterState, is_same
from gputile.scheduler.state.request_cache import RequestCache

RECENT = 1000  # pods


class PodRequests:
    """The requests of pods that filter, bind and preempt are called for."""

    def __init__(self, cluster_state: ClusterState) -> None:
        self._cluster_state = cluster_state
        self._recent: OrderedDict[str, Pod] = OrderedDict()  # pods that kube-scheduler knew before our watch did
        self._cache = RequestCache()

    def of(self, pod: Pod) -> PodRequest | BadRequest | None:
        """What the pod asks for; read once, when our watch saw it, as long as it is the same pod."""
        known = self._cluster_state.waiting.get(pod.uid)
        if known is not None and is_same(known.pod, pod):
            return known.asked
        return self._cache.read(pod, self._cluster_state.settings)

    def remember(self, pod: Pod) -> None:
        """A pod that filter was called for before our watch showed it."""
        self._recent[pod.uid] = pod
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)

    def recent(self, uid: str) -> Pod | None:
        """A pod that was filtered a moment ago and that our watch has not shown yet: its bind need not look it up."""
        return self._recent.get(uid)
