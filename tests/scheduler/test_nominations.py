"""The promise that matters, on the whole scheduler: whatever fails and whenever news comes, no tile is sold twice.

A hypothesis state machine plays kube-scheduler (filter, bind, several at once, repeated), the API server (refuses,
loses answers, is slow, binds by another hand), our watch (late, relisted) and operators (delete, complete).
The oracle adds up what the *cluster* shows: the grants on pods that are bound and not over.

Deliberate bugs it was seen to catch, each alone:
  1. `Binder._write` forgets the tile after a lost answer.
  2. `Binder._assume` places a pod anew whose earlier bind may have landed.
  3. `Binder._refused` forgets after a 409 without looking.
  4. `Binder._refused` takes its own earlier bind for somebody else's (the time in the grant differs).
  5. `Granter._look_up` forgets a pod that the live look shows bound.
  6. `Mirror` counts a pod as gone when its deletion is asked for.
  7. `Mirror` does not book the grants that pods carry.
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
from tests.scheduler.rig import Lands, Rig, Step, refused, tile

SIZE, CARDS, NODES = 8, 2, ("n1", "n2")
WISHES = st.sampled_from(
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
        Lands(),
        Lands(),
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
    """`truth` is `rig.api`; the book hears of it sooner or later."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.born = 0
        self.last: list[tuple[str, str]] = []

    @initialize()
    def start(self) -> None:
        nodes = [node(name).cards(CARDS, size=SIZE) for name in NODES]
        self.rig = Rig(*nodes, bind=BindSettings(timeout=0.06))  # two attempts

    def run(self, *what: Any, script: list[Step], delays: list[int]) -> list[Any]:
        """All at once; the API server does to each call what the script says."""
        api = self.rig.api
        api.script = {call: list(script) for call in ("bind", "pod", "patch_pod")}
        api.script["pod"] = [step for step in script if isinstance(step, OutcomeUnknown)]
        api.delays = list(delays)
        found = self.loop.run_until_complete(self._gather(what))
        api.script, api.delays = {}, []
        return found

    @staticmethod
    async def _gather(what: tuple[Any, ...]) -> list[Any]:
        done = await asyncio.gather(*what, return_exceptions=True)
        for one in done:
            if isinstance(one, BaseException) and not isinstance(one, ApiRejected | OutcomeUnknown):
                raise one
        return list(done)

    def names(self, *, bound: bool | None = None) -> list[str]:
        pods = self.rig.api.pods.values()
        return [one["metadata"]["name"] for one in pods if bound is None or bool(one["spec"]["nodeName"]) == bound]

    # ---- what the world does ----------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.rig.api.pods) < 6)
    @rule(wish=WISHES, seen=st.booleans())
    def arrive(self, wish: tuple[Json, ...], seen: bool) -> None:
        self.born += 1
        name = f"p{self.born}"
        self.rig.api.add_pod(pod(*wish, name=name, uid=f"uid-{name}"))
        if seen:
            self.rig.catch_up()

    @precondition(lambda self: self.names())
    @rule(data=st.data(), how=st.sampled_from(["asked to go", "over", "deleted", "n1", "n2"]))
    def somebody_else_acts(self, data: st.DataObject, how: str) -> None:
        """Deletes a pod, sees it end, or binds it around us."""
        name = data.draw(st.sampled_from(self.names()))
        if how == "deleted":
            self.rig.api.delete_pod(f"default/{name}")
        elif how == "over":
            self.rig.change(name, status={"phase": "Succeeded"})
        elif how == "asked to go":
            self.rig.change(name, metadata={"deletionTimestamp": "2026-08-01T00:00:00Z"})
        elif name in self.names(bound=False):
            self.rig.change(name, spec={"nodeName": how})

    @rule(what=st.sampled_from(["one", "some", "all", "list"]), seconds=st.sampled_from([0.5, 3.0]))
    def news_comes_and_time_passes(self, what: str, seconds: float) -> None:
        if what == "list":
            self.rig.relist()
        else:
            self.rig.catch_up({"one": 1, "some": 3, "all": None}[what])
        self.pass_time(seconds)

    def pass_time(self, seconds: float) -> None:
        self.rig.clock.now += seconds
        self.rig.apply(self.rig.ledger.handle(Tick(self.rig.clock.now)))

    # ---- what kube-scheduler and we do ------------------------------------------------------------------------------

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
        """kube-scheduler repeats itself, whatever it was told; perhaps while the book looks something up."""
        self.rig.leading = True
        self._bind(script, delays, *([self.rig.reconciler.round()] if grants else []))

    def _bind(self, script: list[Step], delays: list[int], *beside: Any) -> None:
        binds = [self.rig.bind(name, to) for name, to in self.last]
        answers = self.run(*binds, *beside, script=script, delays=delays)
        assert all(isinstance(answer, str) for answer in answers[: len(binds)])

    @rule(script=SCRIPT, delays=DELAYS, seconds=st.sampled_from([0.0, 70.0]))
    def grant(self, script: list[Step], delays: list[int], seconds: float) -> None:
        """And look up what the book asks about, when a bind is old."""
        self.rig.leading = True
        self.pass_time(seconds)
        self.run(self.rig.reconciler.round(), script=script, delays=delays)
        self.rig.clock.now += 5

    # ---- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def no_tile_is_sold_twice(self) -> None:
        memory, cores = Counter[str](), Counter[str]()
        for one in self.rig.api.pods.values():
            if one["spec"]["nodeName"] and (one.get("status") or {}).get("phase") != "Succeeded":
                for uuid, use in _uses(one).items():
                    memory[uuid] += use[0]
                    cores[uuid] += use[1]
        assert all(sold <= SIZE for sold in memory.values()), memory
        assert all(sold <= 100 for sold in cores.values()), cores

    @invariant()
    def what_a_bound_pod_was_granted_is_held(self) -> None:
        """Only we grant, so we know of every grant, whether the API server's answer came or not."""
        for one in self.rig.api.pods.values():
            over = (one.get("status") or {}).get("phase") == "Succeeded"
            if one["spec"]["nodeName"] and not over and _uses(one):
                entry = self.rig.ledger.entry(one["metadata"]["uid"])
                assert entry is not None, f"{one['metadata']['name']} is bound, and its tile is free"
                assert _held(entry) == _uses(one)

    @invariant()
    def the_book_adds_up(self) -> None:
        self.rig.ledger.check()
        assert self.rig.count("overcommits_total") == 0

    def teardown(self) -> None:
        try:
            if hasattr(self, "rig"):
                self.settle()
        finally:
            self.loop.close()

    def settle(self) -> None:
        """Then every bound pod is booked with what it carries, and nobody else."""
        self.rig.leading = True
        for _ in range(4):
            self.rig.catch_up()
            self.pass_time(70.0)
            self.run(self.rig.reconciler.round(), script=[], delays=[])
        self.rig.catch_up()
        self.no_tile_is_sold_twice()
        self.the_book_adds_up()
        alive = {
            one["metadata"]["uid"]: one
            for one in self.rig.api.pods.values()
            if one["spec"]["nodeName"] and (one.get("status") or {}).get("phase") != "Succeeded"
        }
        assert {e.allocation.pod for e in self.rig.ledger.entries() if e.state is AllocationState.CONFIRMED} == set(
            alive
        )
        assert self.rig.ledger.in_flight() == []
        for uid, one in alive.items():
            entry = self.rig.ledger.entry(uid)
            assert entry is not None
            assert _held(entry) == _uses(one), "the book and the pod tell the same"


def _held(entry: LedgerEntry) -> dict[str, tuple[int, int]]:
    return {card: (use.memory, use.cores) for card, use in entry.allocation.uses().items()}


def _uses(one: Json) -> dict[str, tuple[int, int]]:
    """What a pod's grant says, added up without the book's arithmetic; none of these pods has init containers."""
    said = (one["metadata"].get("annotations") or {}).get(GRANT)
    if said is None:
        return {}
    sums: dict[str, tuple[int, int]] = {}
    for held in msgspec.json.decode(said)["containers"]:
        for found in held["tiles"]:
            before = sums.get(found["uuid"], (0, 0))
            sums[found["uuid"]] = (before[0] + found["memory"], before[1] + found["cores"])
    return sums


Cluster.TestCase.settings = settings(max_examples=80 * EFFORT, stateful_step_count=20)
TestScheduler = Cluster.TestCase
