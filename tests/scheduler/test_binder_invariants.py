"""The main invariant of the binder: no tile is allocated twice, whatever fails and whenever events arrive.

A hypothesis state machine plays kube-scheduler (filter, bind, several at once, repeated), the API server (rejects,
loses answers, is slow), another scheduler, our watch (late, relisted) and operators (delete, complete). The oracle sums
up the grants in the *cluster*: those of bound pods that have not ended.

Deliberate bugs it was seen to catch, each alone:
  1. `Binder._write` forgets the tile after a lost answer.
  2. `Binder._assume` places a pod again whose earlier bind may have taken effect.
  3. `Binder._rejected` forgets after a 409 without looking.
  4. `Binder._rejected` takes its own earlier bind for another scheduler's (the time in the grant differs).
  5. `Reconciler._look_up` forgets a pod that the API server shows bound.
  6. `ClusterState` counts a pod as gone when it is terminating.
  7. `ClusterState` does not count the grants on pods.
"""

import asyncio
from collections import Counter
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gputile.dialects.gputile import GRANT
from gputile.kube.api import ApiRejected, Json, OutcomeUnknown
from gputile.ledger.events import Tick
from gputile.ledger.ledger import AllocationState, LedgerEntry
from gputile.scheduler.settings import BindSettings
from gputile.testing.builders import node, pod
from tests.effort import EFFORT
from tests.scheduler.rig import LostResponse, Rig, Step, refused, tile

SIZE, CARDS, NODES = 8, 2, ("n1", "n2")
LIMITS = st.sampled_from(
    [
        (tile(3),),
        (tile(5),),
        (tile(8),),
        (tile(4, cores=60),),
        (tile(4, cards=2),),
        ({"gputile.io/gpu": 1},),
        (tile(3), tile(4)),
        ({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 4},),
    ]
)
LOST = OutcomeUnknown("reset")
FAILURES = st.sampled_from(
    [
        None,
        None,
        LostResponse(),
        LostResponse(),
        OutcomeUnknown("reset"),
        OutcomeUnknown("reset"),
        refused(429),
        refused(0),
        refused(403),
        refused(409),
    ]
)
MOSTLY = st.sampled_from([True] * 5 + [False])
PLACES = st.sampled_from(("n1", "n1", "n2"))  # so that they meet
SCRIPT = st.lists(FAILURES, max_size=4)
DELAYS = st.lists(st.integers(0, 6), max_size=12)


class Cluster(RuleBasedStateMachine):
    """The truth is `rig.api`; the ledger learns of it sooner or later."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.born = 0
        self.last: list[tuple[str, str]] = []

    @initialize()
    def start(self) -> None:
        nodes = [node(name).cards(CARDS, size=SIZE) for name in NODES]
        self.rig = Rig(*nodes, bind=BindSettings(timeout=0.06))  # two attempts

    def run(self, *calls: Any, script: list[Step], delays: list[int]) -> list[Any]:
        """All at once; the script decides what happens to each call of the API server."""
        api = self.rig.api
        api.script = {call: list(script) for call in ("bind", "pod", "patch_pod")}
        api.script["pod"] = [step for step in script if isinstance(step, OutcomeUnknown)]
        api.delays = list(delays)
        results = self.loop.run_until_complete(self._gather(calls))
        api.script, api.delays = {}, []
        return results

    @staticmethod
    async def _gather(calls: tuple[Any, ...]) -> list[Any]:
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, ApiRejected | OutcomeUnknown):
                raise result
        return list(results)

    def names(self, *, bound: bool | None = None) -> list[str]:
        pods = self.rig.api.pods.values()
        return [
            manifest["metadata"]["name"]
            for manifest in pods
            if bound is None or bool(manifest["spec"]["nodeName"]) == bound
        ]

    # ---- the cluster ------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.rig.api.pods) < 6)
    @rule(limits=LIMITS, seen=st.booleans())
    def arrive(self, limits: tuple[Json, ...], seen: bool) -> None:
        self.born += 1
        name = f"p{self.born}"
        self.rig.api.add_pod(pod(*limits, name=name, uid=f"uid-{name}"))
        if seen:
            self.rig.catch_up()

    @precondition(lambda self: self.names())
    @rule(data=st.data(), how=st.sampled_from(["terminating", "ended", "deleted", "n1", "n2"]))
    def another_client_acts(self, data: st.DataObject, how: str) -> None:
        """A pod is deleted, ends, or is bound by another scheduler."""
        name = data.draw(st.sampled_from(self.names()))
        if how == "deleted":
            self.rig.api.delete_pod(f"default/{name}")
        elif how == "ended":
            self.rig.change(name, status={"phase": "Succeeded"})
        elif how == "terminating":
            self.rig.change(name, metadata={"deletionTimestamp": "2026-08-01T00:00:00Z"})
        elif name in self.names(bound=False):
            self.rig.change(name, spec={"nodeName": how})

    @rule(events=st.sampled_from(["one", "some", "all", "list"]), seconds=st.sampled_from([0.5, 3.0]))
    def watch_events_arrive_and_time_passes(self, events: str, seconds: float) -> None:
        if events == "list":
            self.rig.relist()
        else:
            self.rig.catch_up({"one": 1, "some": 3, "all": None}[events])
        self.pass_time(seconds)

    def pass_time(self, seconds: float) -> None:
        self.rig.clock.now += seconds
        self.rig.apply(self.rig.ledger.handle(Tick(self.rig.clock.now)))

    # ---- kube-scheduler and gputile ---------------------------------------------------------------------------------

    @precondition(lambda self: self.names(bound=False))
    @rule(data=st.data())
    def filter(self, data: st.DataObject) -> None:
        self.rig.filter(data.draw(st.sampled_from(self.names(bound=False))))

    @precondition(lambda self: self.names())
    @rule(data=st.data(), script=SCRIPT, delays=DELAYS, leads=MOSTLY)
    def bind(self, data: st.DataObject, script: list[Step], delays: list[int], leads: bool) -> None:
        """Several at once, some of them twice."""
        pairs = st.lists(st.tuples(st.sampled_from(self.names()), PLACES), min_size=1, max_size=4)
        self.last = data.draw(pairs)
        self.rig.leading = leads
        self._bind(script, delays)

    @rule(script=SCRIPT, delays=DELAYS, grants=st.booleans())
    def bind_again(self, script: list[Step], delays: list[int], grants: bool) -> None:
        """kube-scheduler repeats its calls, whatever the answer was; perhaps while the reconciler looks up a pod."""
        self.rig.leading = True
        self._bind(script, delays, *([self.rig.reconciler.round()] if grants else []))

    def _bind(self, script: list[Step], delays: list[int], *beside: Any) -> None:
        binds = [self.rig.bind(name, to) for name, to in self.last]
        answers = self.run(*binds, *beside, script=script, delays=delays)
        assert all(isinstance(answer, str) for answer in answers[: len(binds)])

    @rule(script=SCRIPT, delays=DELAYS, seconds=st.sampled_from([0.0, 70.0]))
    def grant(self, script: list[Step], delays: list[int], seconds: float) -> None:
        """Also looks up pods for the ledger, when a bind is old."""
        self.rig.leading = True
        self.pass_time(seconds)
        self.run(self.rig.reconciler.round(), script=script, delays=delays)
        self.rig.clock.now += 5

    # ---- invariants -------------------------------------------------------------------------------------------------

    @invariant()
    def no_tile_is_allocated_twice(self) -> None:
        memory, cores = Counter[str](), Counter[str]()
        for manifest in self.rig.api.pods.values():
            if manifest["spec"]["nodeName"] and (manifest.get("status") or {}).get("phase") != "Succeeded":
                for uuid, use in _uses(manifest).items():
                    memory[uuid] += use[0]
                    cores[uuid] += use[1]
        assert all(total <= SIZE for total in memory.values()), memory
        assert all(total <= 100 for total in cores.values()), cores

    @invariant()
    def the_grant_of_a_bound_pod_is_in_the_ledger(self) -> None:
        """Only gputile grants, so it knows every grant, even if the API server's answer was lost."""
        for manifest in self.rig.api.pods.values():
            has_ended = (manifest.get("status") or {}).get("phase") == "Succeeded"
            if manifest["spec"]["nodeName"] and not has_ended and _uses(manifest):
                entry = self.rig.ledger.entry(manifest["metadata"]["uid"])
                assert entry is not None, f"{manifest['metadata']['name']} is bound, and its tile is free"
                assert _allocated(entry) == _uses(manifest)

    @invariant()
    def the_ledger_is_consistent(self) -> None:
        self.rig.ledger.check()
        assert self.rig.count("overcommits_total") == 0

    def teardown(self) -> None:
        try:
            if hasattr(self, "rig"):
                self.settle()
        finally:
            self.loop.close()

    def settle(self) -> None:
        """In the end the ledger has every bound pod with its grant, and no other."""
        self.rig.leading = True
        for _ in range(4):
            self.rig.catch_up()
            self.pass_time(70.0)
            self.run(self.rig.reconciler.round(), script=[], delays=[])
        self.rig.catch_up()
        self.no_tile_is_allocated_twice()
        self.the_ledger_is_consistent()
        alive = {
            manifest["metadata"]["uid"]: manifest
            for manifest in self.rig.api.pods.values()
            if manifest["spec"]["nodeName"] and (manifest.get("status") or {}).get("phase") != "Succeeded"
        }
        entries = self.rig.ledger.entries()
        confirmed = {entry.allocation.pod for entry in entries if entry.state is AllocationState.CONFIRMED}
        assert confirmed == set(alive)
        assert self.rig.ledger.in_flight() == []
        for uid, manifest in alive.items():
            entry = self.rig.ledger.entry(uid)
            assert entry is not None
            assert _allocated(entry) == _uses(manifest), "the ledger and the pod agree"


def _allocated(entry: LedgerEntry) -> dict[str, tuple[int, int]]:
    return {card: (use.memory, use.cores) for card, use in entry.allocation.uses().items()}


def _uses(manifest: Json) -> dict[str, tuple[int, int]]:
    """The sums of a pod's grant, without the ledger's arithmetic; none of these pods has init containers."""
    grant = (manifest["metadata"].get("annotations") or {}).get(GRANT)
    if grant is None:
        return {}
    sums: dict[str, tuple[int, int]] = {}
    for container in msgspec.json.decode(grant)["containers"]:
        for granted in container["tiles"]:
            before = sums.get(granted["uuid"], (0, 0))
            sums[granted["uuid"]] = (before[0] + granted["memory"], before[1] + granted["cores"])
    return sums


Cluster.TestCase.settings = settings(max_examples=80 * EFFORT, stateful_step_count=20)
TestBinder = Cluster.TestCase
