"""The faults: one function each, with targets and durations from the seed.

A fault begins, lasts and heals inside its function: when it returns, every process must run again. Measurements, such
as the duration of a failover, are kept by the scene.
"""

import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from tests.e2e.chaos.proxy import Rule
from tests.e2e.chaos.storm import retry
from tests.e2e.processes import wait_until

if TYPE_CHECKING:
    from tests.e2e.chaos.campaign import Scene

Dice = random.Random
FAILOVER = 15.0  # seconds that there may be no leader


# ---- gputile's processes --------------------------------------------------------------------------------------------


def kill_and_restart(scene: "Scene", dice: Dice) -> None:
    """kill -9 of the leader, and a new process in its place at once, as a kubelet restarts it."""
    leader = scene.leader()
    scene.kill(leader)
    time.sleep(dice.uniform(0.1, 1.0))
    scene.start(leader)


def kill_all(scene: "Scene", dice: Dice) -> None:
    """kill -9 of every replica: no process is left that has the ledger."""
    for name in scene.replicas:
        scene.kill(name)
    time.sleep(dice.uniform(0.1, 1.0))
    for name in scene.replicas:
        scene.start(name)


def kill_leader(scene: "Scene", dice: Dice) -> None:
    """kill -9 of the leader, which is restarted after the other replica was elected."""
    leader = scene.leader()
    with scene.failover(leader, "killed"):
        scene.kill(leader)
    scene.start(leader)


def freeze_leader(scene: "Scene", dice: Dice) -> None:
    """SIGSTOP beyond the lease; on SIGCONT another replica is the leader, and this one must not write."""
    leader = scene.leader()
    with scene.failover(leader, "frozen"):
        scene.freeze(leader)
    time.sleep(dice.uniform(0.5, 2.0))
    scene.thaw(leader)


def cut_leader_off(scene: "Scene", dice: Dice) -> None:
    """The leader cannot reach the API server; it must give up leadership before the other replica is elected."""
    leader = scene.leader()
    with scene.failover(leader, "cut off"):
        scene.black_out(leader)
    time.sleep(dice.uniform(0.5, 2.0))
    scene.heal(leader)


# ---- the control plane ----------------------------------------------------------------------------------------------


def restart_api_server(scene: "Scene", dice: Dice) -> None:
    kill = dice.random() < 0.7
    scene.plane.restart_api_server(kill=kill)


def restart_etcd(scene: "Scene", dice: Dice) -> None:
    scene.plane.etcd.kill()
    time.sleep(dice.uniform(0.2, 2.0))
    scene.plane.etcd.start()
    retry(lambda: scene.plane.kube.list("Node"), "reading after the restart of etcd", 60)


def restart_scheduler(scene: "Scene", dice: Dice) -> None:
    scene.scheduler.child.kill()
    time.sleep(dice.uniform(0.1, 1.0))
    scene.scheduler.restart()


# ---- the connection to the API server -------------------------------------------------------------------------------


def cut_watches(scene: "Scene", dice: Dice) -> None:
    for _ in range(dice.randint(3, 6)):
        for proxy in scene.proxies.values():
            scene.count("watches cut", proxy.cut_watches())
        time.sleep(dice.uniform(0.2, 1.0))


def delay_answers(scene: "Scene", dice: Dice) -> None:
    """Some responses are slow, some slower than a bind may take."""
    slow = Rule(what="delay", share=0.4, seconds=dice.uniform(0.2, 0.8))
    too_slow = Rule(what="delay", share=0.05, match=r"binding$", seconds=dice.uniform(2.5, 5.0))
    _inject(scene, dice, too_slow, slow)


def invent_answers(scene: "Scene", dice: Dice) -> None:
    """409, 429 and 500 for requests that the API server never received."""
    _inject(scene, dice, *(Rule(what="answer", share=0.12, status=status) for status in (409, 429, 500)))


def lose_answers(scene: "Scene", dice: Dice) -> None:
    """The API server executed the request, and gputile receives a 500 or a reset."""
    rules = [Rule(what="lose", share=0.15, status=500), Rule(what="reset", share=0.15)]
    binds = Rule(what="reset", share=0.3, match=r"binding$")
    _inject(scene, dice, binds, *rules)


def refuse_binds(scene: "Scene", dice: Dice) -> None:
    """Most binds: definite rejections and lost successes for the same pods."""
    status = dice.choice((409, 429, 500, 503))
    before = Rule(what="answer", share=0.4, match=r"binding$", status=status)
    after = Rule(what="lose", share=0.4, match=r"binding$", status=500)
    _inject(scene, dice, before, after)


def _inject(scene: "Scene", dice: Dice, *rules: Rule) -> None:
    """Apply the rules in both proxies for some seconds."""
    seconds = dice.uniform(3.0, 5.0)
    for proxy in scene.proxies.values():
        proxy.inject(*rules)
    time.sleep(seconds)
    for proxy in scene.proxies.values():
        proxy.heal()


def no_api_server_for_long(scene: "Scene", dice: Dice) -> None:
    """The API server is unreachable for longer than a replica may report itself ready."""
    for name in scene.replicas:
        scene.black_out(name)
    for name in scene.replicas:
        wait_until(lambda name=name: not scene.probes[name].is_ready(), 45, f"{name} is not ready")  # type: ignore[misc]
    time.sleep(dice.uniform(6.0, 8.0))
    for name in scene.replicas:
        scene.heal(name)


# ---- a Binding that arrives late ------------------------------------------------------------------------------------


def bind_from_the_grave(scene: "Scene", dice: Dice) -> None:
    """The leader's Bindings are held in the network while it is frozen and another replica leads, then delivered.

    Where the new leader has allocated their tiles, two pods hold one tile: the newer pod is evicted with an event.
    """
    leader = scene.leader()
    proxy = scene.proxies[leader]
    proxy.hold(r"binding$")
    with suppress(AssertionError):  # the storm may be over already
        wait_until(lambda: proxy.held_binds > 0, 5, "a bind is held")
    with scene.failover(leader, "frozen"):
        scene.freeze(leader)
    time.sleep(dice.uniform(0.5, 1.5))
    scene.count("binds held", proxy.held_binds)
    proxy.release()
    time.sleep(1.0)
    scene.thaw(leader)


FAULTS: dict[str, Callable[["Scene", Dice], None]] = {
    fault.__name__.replace("_", "-"): fault
    for fault in (
        kill_and_restart,
        kill_all,
        kill_leader,
        freeze_leader,
        cut_leader_off,
        restart_api_server,
        restart_etcd,
        restart_scheduler,
        cut_watches,
        delay_answers,
        invent_answers,
        lose_answers,
        refuse_binds,
        bind_from_the_grave,
        no_api_server_for_long,
    )
}
LONG = frozenset({"no-api-server-for-long", "kill-all", "refuse-binds", "freeze-leader"})
"""Excluded from the short run: too long, or similar to another fault of it."""
OVERLAPS = frozenset({"bind-from-the-grave", "freeze-leader"})  # may double-allocate a tile for a moment
