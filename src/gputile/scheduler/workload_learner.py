"""Learns which requests are usual, for the policies that weigh them: counts arrivals, and trains the model in a thread.

The thread gets values and returns a model; only the event loop touches the fleet.
"""

import asyncio
from functools import partial

from gputile.background.failure_isolation import FailureIsolation
from gputile.concurrency.tasks import cancel_all
from gputile.engine.policies.workload_model import TrainingData
from gputile.scheduler.state.cluster_state import ClusterState

LOOP = "learning"  # in logs and metrics


class WorkloadLearner:
    """Keeps the fleet's model of the workload up to date with the pods that arrive."""

    def __init__(self, cluster_state: ClusterState, isolation: FailureIsolation) -> None:
        self._cluster_state, self._isolation = cluster_state, isolation
        self._scorer = cluster_state.ledger.fleet.scorer
        self._training: asyncio.Task[None] | None = None

    def learn(self, *, is_synced: bool) -> None:
        """Count the requests that arrived. The first list is learnt as a whole, so not before it is complete."""
        arrivals = self._cluster_state.take_arrivals() if is_synced else ()
        for request in arrivals:
            self._isolation.step(LOOP, "", partial(self._scorer.observe, request))
        self._scorer.refresh_prices()
        if self._scorer.is_due() and (self._training is None or self._training.done()):
            self._training = asyncio.create_task(self._train(self._scorer.lesson()))

    async def learn_from_list(self) -> None:
        """Train on all pods of the first list."""
        await self._train(self._scorer.lesson_from(self._cluster_state.take_arrivals()))

    async def _train(self, training_data: TrainingData) -> None:
        """The model is computed in a thread, because that takes a while."""
        model = await self._isolation.attempt(LOOP, "", lambda: asyncio.to_thread(training_data.study), always=True)
        if model is not None:
            self._isolation.step(LOOP, "", partial(self._scorer.adopt, model))

    async def stop(self) -> None:
        await cancel_all([self._training] if self._training is not None else [])
