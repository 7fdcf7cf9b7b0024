"""The promise that matters, on the whole scheduler: whatever fails and whenever news comes, no tile is sold twice.

A hypothesis state machine plays kube-scheduler (filter, bind, several at once, repeated), the API server (refuses,
loses answers, is slow, binds by another hand), our watch (late, relisted) and operators (delete, complete).
The oracle adds up what the *cluster* shows: the grants on pods that are bound and not over.

Deliberate bugs it was seen to catch, each alone:
  1. `_write` forgets the tile after a lost answer.
  2. `_assume` places a pod anew that is assumed already (two grants for one pod, and the later one is believed).
  3. `_refused` forgets after a 409 without looking.
  4. `Granter._look_up` forgets a pod that the live look shows bound.
  5. `Mirror.pod_changed` counts a pod as gone when its deletion is asked for.
  6. `Granter._grant` books nothing before it writes.
  7. `Mirror._see_bound` ignores the grants of pods that were bound by an earlier leader.
"""

import asyncio
from collections import Counter
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gputile.book.events import Tick
from gputile.book.ledger import Entry, State
from gputile.dialects.gputile import GRANT
from gputile.kube.values import Json, Refused, Unclear
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
FAILURES = st.sampled_from(
    [None, None, None, Lands(), Lands(), Unclear("reset"), refused(429), refused(0), refused(403), refused(409)]
)
SCRIPT = st.lists(FAILURES, max_size=6)
DELAYS = st.lists(st.integers(0, 6), max_size=12)


class Cluster(RuleBasedStateMachine):
    """`truth` is `rig.api`; the book hears of it sooner or later."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.born = 0

    @initialize()
    def start(self) -> None:
        self.rig = Rig(*(node(name).cards(CARDS, size=SIZE) for name in NODES))

    def run(self, *what: Any, script: list[Step], delays: list[int]) -> list[Any]:
        """All at once; the API server does to each call what the script says."""
        api = self.rig.api
        api.script = {call: list(script) for call in ("bind", "pod", "patch_pod")}
        api.script["pod"] = [step for step in script if isinstance(step, Unclear)]
        api.delays = list(delays)
        found = self.loop.run_until_complete(self._gather(what))
        api.script, api.delays = {}, []
        return found

    @staticmethod
    async def _gather(what: tuple[Any, ...]) -> list[Any]:
        done = await asyncio.gather(*what, return_exceptions=True)
        for one in done:
            if isinstance(one, BaseException) and not isinstance(one, Refused | Unclear):
                raise one
        return list(done)

    def names(self, *, bound: bool | None = None) -> list[str]:
        pods = self.rig.api.pods.values()
        return [one["metadata"]["name"] for one in pods if bound is None or bool(one["spec"]["nodeName"]) == bound]

    # ---- what the world does ----------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.rig.api.pods) < 7)
    @rule(wish=WISHES)
    def arrive(self, wish: tuple[Json, ...]) -> None:
        self.born += 1
        name = f"p{self.born}"
        self.rig.api.add_pod(pod(*wish, name=name, uid=f"uid-{name}"))

    @rule(data=st.data(), wish=WISHES, to=st.sampled_from(NODES))
    def somebody_else_binds(self, data: st.DataObject, wish: tuple[Json, ...], to: str) -> None:
        waiting = self.names(bound=False)
        if waiting:
            self.rig.change(data.draw(st.sampled_from(waiting)), spec={"nodeName": to})

    @rule(data=st.data(), how=st.sampled_from(["deleted", "over", "asked to go"]))
    def a_pod_ends(self, data: st.DataObject, how: str) -> None:
        if not self.names():
            return
        name = data.draw(st.sampled_from(self.names()))
        if how == "deleted":
            self.rig.api.delete_pod(f"default/{name}")
        elif how == "over":
            self.rig.change(name, status={"phase": "Succeeded"})
        else:
            self.rig.change(name, metadata={"deletionTimestamp": "2026-08-01T00:00:00Z"})

    @rule(count=st.integers(1, 5))
    def the_watch_tells(self, count: int) -> None:
        self.rig.catch_up(count)

    @rule()
    def the_watch_is_made_anew(self) -> None:
        self.rig.relist()

    @rule(seconds=st.sampled_from([0.5, 3.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.rig.clock.now += seconds
        self.rig.carry_out(self.rig.ledger.handle(Tick(self.rig.clock.now)))

    @rule()
    def leadership_comes_and_goes(self) -> None:
        self.rig.leading = not self.rig.leading

    # ---- what kube-scheduler and we do ------------------------------------------------------------------------------

    @rule(data=st.data())
    def filter(self, data: st.DataObject) -> None:
        waiting = self.names(bound=False)
        if waiting:
            self.rig.filter(data.draw(st.sampled_from(waiting)))

    @rule(data=st.data(), script=SCRIPT, delays=DELAYS, grants=st.booleans())
    def bind(self, data: st.DataObject, script: list[Step], delays: list[int], grants: bool) -> None:
        if not self.names():
            return
        pairs = st.lists(st.tuples(st.sampled_from(self.names()), st.sampled_from(NODES)), min_size=1, max_size=4)
        binds = [self.rig.bind(name, to) for name, to in data.draw(pairs)]
        rounds = [self.rig.granter.round()] if grants else []
        for name_and_node, answer in zip(binds, self.run(*binds, *rounds, script=script, delays=delays), strict=False):
            assert isinstance(answer, str), name_and_node

    @rule(script=SCRIPT, delays=DELAYS)
    def grant(self, script: list[Step], delays: list[int]) -> None:
        self.run(self.rig.granter.round(), script=script, delays=delays)
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
        assert self.rig.count("conflicts_total") == 0

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
            self.time_passes(31.0)
            self.run(self.rig.granter.round(), script=[], delays=[])
        self.rig.catch_up()
        self.no_tile_is_sold_twice()
        self.the_book_adds_up()
        alive = {
            one["metadata"]["uid"]: one
            for one in self.rig.api.pods.values()
            if one["spec"]["nodeName"] and (one.get("status") or {}).get("phase") != "Succeeded"
        }
        assert {e.holding.pod for e in self.rig.ledger.entries() if e.state is State.CONFIRMED} == set(alive)
        assert self.rig.ledger.in_flight() == []
        for uid, one in alive.items():
            entry = self.rig.ledger.entry(uid)
            assert entry is not None
            assert _held(entry) == _uses(one), "the book and the pod tell the same"


def _held(entry: Entry) -> dict[str, tuple[int, int]]:
    return {card: (use.memory, use.cores) for card, use in entry.holding.uses().items()}


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


Cluster.TestCase.settings = settings(max_examples=60 * EFFORT, stateful_step_count=25)
TestScheduler = Cluster.TestCase
