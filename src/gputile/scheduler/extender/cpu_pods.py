"""Pods that ask for no GPU, led to nodes where they strand no card. Off unless `steer_cpu_pods` is set.

Room:  the filter of a second extender stanza, which kube-scheduler asks about every pod. It never says no: what it does
       not steer passes with all the nodes it came with, and kube-scheduler binds it itself.
Door:  `CpuPodSteering.filter`.

Left to kube-scheduler, a pod without GPUs goes where CPU is plenty, and the cards there starve for it. Here it goes to
the best node under the policy, as in the simulator. It is pencilled in there like any other pod, for kube-scheduler
filters the next one before this one is bound; the pencil ends when our watch shows it bound, or in time.
"""

from collections.abc import Callable

from gputile.dialects import registry
from gputile.dialects.kube_objects import Pod
from gputile.ledger.events import Reserved
from gputile.model.allocations import Allocation
from gputile.model.requests import PodRequest
from gputile.scheduler.extender_api import FilterAnswer, FilterArgs
from gputile.scheduler.settings import Settings
from gputile.scheduler.state.allocations import seed_of
from gputile.scheduler.state.cluster_state import ClusterState, created, plain_request


class CpuPodSteering:
    """See the module's text."""

    def __init__(
        self, cluster_state: ClusterState, settings: Settings, *, leads: Callable[[], bool], clock: Callable[[], float]
    ) -> None:
        self._cluster_state, self._ledger, self._settings = cluster_state, cluster_state.ledger, settings
        self._leads, self._clock = leads, clock
        self._led: set[str] = set()  # pods that were shown a node
        cluster_state.keeps_plain = settings.steer_cpu_pods

    def filter(self, args: FilterArgs) -> FilterAnswer:
        asked = self._asked(args.pod)
        best = self._best(args, asked) if asked is not None else []
        return FilterAnswer(names=best or args.names)

    def prune(self) -> None:
        """Drop what is remembered of pods that wait no more."""
        self._led &= self._cluster_state.plain.keys()

    def _asked(self, pod: Pod) -> PodRequest | None:
        """What the pod asks of its node; None when it is not ours to lead.

        A pod that asks for nothing strands nothing. One that comes again after it was shown a node could not go there,
        for reasons that we do not know; it is free to go anywhere.
        """
        if not self._settings.steer_cpu_pods or not self._leads() or pod.uid in self._led:
            return None
        asked = self._cluster_state.plain.get(pod.uid)
        if asked is None:  # a pod with GPUs, or one that kube-scheduler knows before our watch does
            is_plain = (
                pod.uid not in self._cluster_state.waiting
                and registry.read_pod(pod, self._cluster_state.settings) is None
            )
            asked = plain_request(pod) if is_plain else None
        return asked if asked is not None and (asked.cpu or asked.memory) else None

    def _best(self, args: FilterArgs, asked: PodRequest) -> list[str]:
        pod, keep, slack = args.pod, self._settings.filter.keep, self._settings.filter.slack
        if self._ledger.entry(pod.uid) is not None:
            return []
        policy, seed = self._settings.policy, seed_of(pod.uid)
        best = self._ledger.fleet.best(asked, policy, seed=seed, among=args.names, keep=keep, slack=slack)
        if not best:
            return []
        self._led.add(pod.uid)
        others_open = self._ledger.reservations() > 0
        reserved = self._reserve(pod, asked, best[0])
        return best[:1] if reserved and others_open else best

    def _reserve(self, pod: Pod, asked: PodRequest, node: str) -> bool:
        """Only for pods that our watch knows: others could never be rubbed out."""
        if pod.uid not in self._cluster_state.plain:
            return False
        self._ledger.handle(Reserved(_allocation(pod, asked, node), self._clock()))
        return True


def _allocation(pod: Pod, asked: PodRequest, node: str) -> Allocation:
    return Allocation(
        pod=pod.uid,
        node=node,
        name=pod.key,
        grant=None,
        cpu=asked.cpu,
        memory=asked.memory,
        priority=pod.priority,
        started=created(pod),
    )
