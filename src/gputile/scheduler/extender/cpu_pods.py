"""Steering of CPU-only pods to nodes where they leave the fewest GPUs without CPU. Off unless `steer_cpu_pods` is set.

It is the filter of a second extender, which kube-scheduler calls for every pod. It never rejects a pod: a pod that it
does not steer passes with all its nodes, and kube-scheduler binds it itself.

Without steering, kube-scheduler prefers the nodes with the most free CPU, and the GPUs there are stranded. With it, the
pod goes to the best node under the policy, as in the simulator. The pod is reserved there like any other, because
kube-scheduler filters the next pod before this one is bound. The reservation ends when the watch shows the pod bound,
or when it expires.
"""

from collections.abc import Callable

from gputile.dialects import registry
from gputile.dialects.allocations import allocation_of
from gputile.dialects.kube_objects import Pod
from gputile.ledger.events import Reserved
from gputile.model.requests import PodRequest
from gputile.scheduler.extender_api import FilterAnswer, FilterArgs
from gputile.scheduler.settings import Settings
from gputile.scheduler.state.cluster_state import ClusterState, cpu_request
from gputile.scheduler.state.pod_requests import seed_of


class CpuPodSteering:
    """The filter for pods without GPU requests."""

    def __init__(
        self, cluster_state: ClusterState, settings: Settings, *, leads: Callable[[], bool], clock: Callable[[], float]
    ) -> None:
        self._cluster_state, self._ledger, self._settings = cluster_state, cluster_state.ledger, settings
        self._leads, self._clock = leads, clock
        self._steered: set[str] = set()  # UIDs of pods that were steered once
        cluster_state.tracks_cpu_pods = settings.steer_cpu_pods

    def filter(self, args: FilterArgs) -> FilterAnswer:
        request = self._steerable_request(args.pod)
        best = self._best(args, request) if request is not None else []
        return FilterAnswer(names=best or args.names)

    def prune(self) -> None:
        """Forget pods that are no longer pending."""
        self._steered &= self._cluster_state.cpu_pods.keys()

    def _steerable_request(self, pod: Pod) -> PodRequest | None:
        """The CPU and memory that the pod requests; None when it is not steered.

        A pod without requests strands no GPU. A pod that is filtered again after it was steered could not run on that
        node for reasons that we do not know; it may go anywhere.
        """
        if not self._settings.steer_cpu_pods or not self._leads() or pod.uid in self._steered:
            return None
        request = self._cluster_state.cpu_pods.get(pod.uid)
        if request is None:  # a pod with GPUs, or one that kube-scheduler knows before our watch does
            is_cpu_pod = (
                pod.uid not in self._cluster_state.pending
                and registry.read_pod(pod, self._cluster_state.settings) is None
            )
            request = cpu_request(pod) if is_cpu_pod else None
        return request if request is not None and (request.cpu or request.memory) else None

    def _best(self, args: FilterArgs, request: PodRequest) -> list[str]:
        pod, keep, slack = args.pod, self._settings.filter.keep, self._settings.filter.slack
        if self._ledger.entry(pod.uid) is not None:
            return []
        policy, seed = self._settings.policy, seed_of(pod.uid)
        best = self._ledger.fleet.best(request, policy, seed=seed, among=args.names, keep=keep, slack=slack)
        if not best:
            return []
        self._steered.add(pod.uid)
        others_reserved = self._ledger.reservations() > 0
        reserved = self._reserve(pod, request, best[0])
        return best[:1] if reserved and others_reserved else best

    def _reserve(self, pod: Pod, request: PodRequest, node: str) -> bool:
        """Only for pods that our watch has shown: the watch would never end the reservation of another pod."""
        if pod.uid not in self._cluster_state.cpu_pods:
            return False
        self._ledger.handle(Reserved(allocation_of(pod, request, None, node), self._clock()))
        return True
