"""What breaks: one function per kind of fault, told where and for how long by the seed.

Room:  each fault begins, lasts and heals inside its function; when it returns everything runs again. What a fault finds
       out (how long a failover took) is kept by the scene.
Door:  `FAULTS`, by name; each takes the scene and dice of its own.
"""

import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from tests.e2e.chaos.proxy import Rule
from tests.e2e.chaos.storm import patient
from tests.e2e.processes import wait_until

if TYPE_CHECKING:
    from tests.e2e.chaos.campaign import Scene

Dice = random.Random
FAILOVER = 15.0  # seconds that nobody may lead


# ---- our own process ------------------------------------------------------------------------------------------------


def kill_and_restart(scene: "Scene", dice: Dice) -> None:
    """kill -9 of the leader, and a new process in its place at once, as a kubelet would do it."""
    leader = scene.leader()
    scene.kill(leader)
    time.sleep(dice.uniform(0.1, 1.0))
    scene.start(leader)


def kill_all(scene: "Scene", dice: Dice) -> None:
    """kill -9 of every replica; nobody is left who knows anything."""
    for name in scene.replicas:
        scene.kill(name)
    time.sleep(dice.uniform(0.1, 1.0))
    for name in scene.replicas:
        scene.start(name)


def kill_leader(scene: "Scene", dice: Dice) -> None:
    """kill -9 of the leader, which stays away until the other leads."""
    leader = scene.leader()
    with scene.failover(leader, "killed"):
        scene.kill(leader)
    scene.start(leader)


def freeze_leader(scene: "Scene", dice: Dice) -> None:
    """SIGSTOP beyond the lease; when it wakes up another leads, and it must not write."""
    leader = scene.leader()
    with scene.failover(leader, "frozen"):
        scene.freeze(leader)
    time.sleep(dice.uniform(0.5, 2.0))
    scene.thaw(leader)


def cut_leader_off(scene: "Scene", dice: Dice) -> None:
    """The leader runs and cannot reach the API server; it must give up before the other begins."""
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
    patient(lambda: scene.plane.kube.list("Node"), "reading after etcd came back", 60)


def restart_scheduler(scene: "Scene", dice: Dice) -> None:
    scene.scheduler.child.kill()
    time.sleep(dice.uniform(0.1, 1.0))
    scene.scheduler.restart()


# ---- the way to the API server --------------------------------------------------------------------------------------


def cut_watches(scene: "Scene", dice: Dice) -> None:
    for _ in range(dice.randint(3, 6)):
        for proxy in scene.proxies.values():
            scene.count("watches cut", proxy.cut_watches())
        time.sleep(dice.uniform(0.2, 1.0))


def delay_answers(scene: "Scene", dice: Dice) -> None:
    """Some slow, some slower than a bind may take."""
    slow = Rule(what="delay", share=0.4, seconds=dice.uniform(0.2, 0.8))
    too_slow = Rule(what="delay", share=0.05, match=r"binding$", seconds=dice.uniform(2.5, 5.0))
    _for_a_while(scene, dice, too_slow, slow)


def invent_answers(scene: "Scene", dice: Dice) -> None:
    """409, 429 and 500 for requests that the API server never saw."""
    _for_a_while(scene, dice, *(Rule(what="answer", share=0.12, status=status) for status in (409, 429, 500)))


def lose_answers(scene: "Scene", dice: Dice) -> None:
    """The API server did it, and we hear a 500, or nothing."""
    wrong = [Rule(what="lose", share=0.15, status=500), Rule(what="reset", share=0.15)]
    binds = Rule(what="reset", share=0.3, match=r"binding$")
    _for_a_while(scene, dice, binds, *wrong)


def refuse_binds(scene: "Scene", dice: Dice) -> None:
    """Only the binds, and most of them: definite no's and lost yes's for the same pods."""
    status = dice.choice((409, 429, 500, 503))
    before = Rule(what="answer", share=0.4, match=r"binding$", status=status)
    after = Rule(what="lose", share=0.4, match=r"binding$", status=500)
    _for_a_while(scene, dice, before, after)


def _for_a_while(scene: "Scene", dice: Dice, *rules: Rule) -> None:
    seconds = dice.uniform(3.0, 5.0)
    for proxy in scene.proxies.values():
        proxy.inject(*rules)
    time.sleep(seconds)
    for proxy in scene.proxies.values():
        proxy.heal()


def no_api_server_for_long(scene: "Scene", dice: Dice) -> None:
    """Out of reach for longer than a replica may call itself ready."""
    for name in scene.replicas:
        scene.black_out(name)
    for name in scene.replicas:
        wait_until(lambda name=name: not scene.probes[name].is_ready(), 45, f"{name} calls itself not ready")  # type: ignore[misc]
    time.sleep(dice.uniform(6.0, 8.0))
    for name in scene.replicas:
        scene.heal(name)


# ---- a Binding that lands late --------------------------------------------------------------------------------------


def bind_from_the_grave(scene: "Scene", dice: Dice) -> None:
    """The leader's Bindings hang in the network while it is frozen and another leads; then they all land.

    Where the successor has sold their tiles, two pods hold one: the last who came is evicted and told.
    """
    leader = scene.leader()
    proxy = scene.proxies[leader]
    proxy.hold(r"binding$")
    with suppress(AssertionError):  # the storm may be over already
        wait_until(lambda: proxy.allocation > 0, 5, "a bind is on its way")
    with scene.failover(leader, "frozen"):
        scene.freeze(leader)
    time.sleep(dice.uniform(0.5, 1.5))
    scene.count("binds held", proxy.allocation)
    proxy.release()
    time.sleep(1.0)
    scene.thaw(leader)


FAULTS: dict[str, Callable[["Scene", Dice], None]] = {
    one.__name__.replace("_", "-"): one
    for one in (
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
"""Not in the short run: too long, or near to another that is in it."""
OVERLAPS = frozenset({"bind-from-the-grave", "freeze-leader"})  # after which two pods may hold one tile for a moment
