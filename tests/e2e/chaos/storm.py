"""A storm of pods of every dialect that are created and deleted, planned from a seed.

The plan is pure: the same seed makes the same pods in the same order. Its execution retries each action until the API
server confirms it, through every outage.
"""

import random
import time
from collections.abc import Callable, Iterator
from http.client import HTTPException
from typing import Any, Literal, TypeVar

import msgspec

from tests.e2e.api import ApiError, Kube, Manifest
from tests.e2e.pods import container, pod, tile

T = TypeVar("T")
GIVE_UP = 120.0  # seconds that the API server may be unreachable
LIVE = 200  # pods at one time; about a quarter of them is pending
PACE = 0.012  # seconds between two actions

Dice = random.Random
MODELS = ("Tesla T4", "Tesla V100-SXM2-32GB")


# ---- kinds of pods --------------------------------------------------------------------------------------------------


def _gputile(dice: Dice, name: str) -> Manifest:
    return tile(name, dice.choice((1000, 2000, 3000, 5000, 8000)))


def _with_cores(dice: Dice, name: str) -> Manifest:
    limits = {"gputile.io/gpu": 1, "gputile.io/memory": 2000, "gputile.io/cores": dice.choice((10, 30, 50))}
    return pod(name, limits)


def _whole(dice: Dice, name: str) -> Manifest:
    return pod(name, {"gputile.io/gpu": 1})


def _several_cards(dice: Dice, name: str) -> Manifest:
    return tile(name, dice.choice((2000, 4000)), cards=dice.choice((2, 3)))


def _several_containers(dice: Dice, name: str) -> Manifest:
    limits = {"gputile.io/gpu": 1, "gputile.io/memory": dice.choice((1500, 3000))}
    return pod(name, {}, containers=[container("a", limits), container("b", limits), container("plain")])


def _init_and_sidecar(dice: Dice, name: str) -> Manifest:
    big, small = ({"gputile.io/gpu": 1, "gputile.io/memory": memory} for memory in (6000, 1000))
    first = [container("prepare", big), container("helper", small, restartPolicy="Always")]
    return pod(name, {}, initContainers=first, containers=[container("main", small)])


def _gpushare(dice: Dice, name: str) -> Manifest:
    return pod(name, {"aliyun.com/gpu-mem": dice.randint(1, 6)})


def _gpushare_two_cards(dice: Dice, name: str) -> Manifest:
    return pod(name, {"aliyun.com/gpu-mem": 4}, labels={"aliyun.com/gpu-count": "2"})


def _nano(dice: Dice, name: str) -> Manifest:
    return pod(name, {"nano-gpu.io/gpu-core": dice.choice((10, 20)), "nano-gpu.io/gpu-memory": 2})


def _nano_first(dice: Dice, name: str) -> Manifest:
    return pod(name, {"nano-gpu/gpu-percent": dice.choice((20, 40))})


def _elastic(dice: Dice, name: str) -> Manifest:
    return pod(name, {"elasticgpu.io/gpu-core": dice.choice((10, 20)), "elasticgpu.io/gpu-memory": 1500})


def _tencent(dice: Dice, name: str) -> Manifest:
    return pod(name, {"tencent.com/vcuda-core": dice.choice((10, 30)), "tencent.com/vcuda-memory": 10})


def _vcuda_fork(dice: Dice, name: str) -> Manifest:
    return pod(name, {"nvidia.com/vcuda-core": dice.choice((10, 30)), "nvidia.com/vcuda-memory": 2500})


def _nvidia(dice: Dice, name: str) -> Manifest:
    return pod(name, {"nvidia.com/gpu": 1}, annotations={"nvidia.com/gpu.model": dice.choice(MODELS)})


def _hami(dice: Dice, name: str) -> Manifest:
    limits = {"nvidia.com/gpu": dice.choice((1, 1, 2)), "nvidia.com/gpumem": 3000, "nvidia.com/gpucores": 20}
    return pod(name, limits)


def _vgpu(dice: Dice, name: str) -> Manifest:
    return pod(name, {"nvidia.com/vgpu-number": 1, "nvidia.com/vgpu-memory": 3000, "nvidia.com/vgpu-cores": 20})


KINDS: tuple[Callable[[Dice, str], Manifest], ...] = (
    _gputile,
    _gputile,
    _with_cores,
    _whole,
    _several_cards,
    _several_containers,
    _init_and_sidecar,
    _gpushare,
    _gpushare_two_cards,
    _nano,
    _nano_first,
    _elastic,
    _tencent,
    _vcuda_fork,
    _nvidia,
    _hami,
    _vgpu,
)


# ---- the plan -------------------------------------------------------------------------------------------------------


class Action(msgspec.Struct, frozen=True):
    """Create a pod, delete it, or (if it runs) let it finish and then delete it."""

    what: Literal["create", "delete", "finish"]
    name: str
    manifest: Manifest | None = None


def plan(seed: int, pods: int) -> list[Action]:
    """Every pod is created; above `LIVE` pods, others are deleted, in the order of the seed."""
    return list(_actions(random.Random(seed), pods))


def _actions(dice: Dice, pods: int) -> Iterator[Action]:
    live: list[str] = []
    for number in range(pods):
        name = f"s{number:04}"
        yield Action("create", name, dice.choice(KINDS)(dice, name))
        live.append(name)
        while len(live) > LIVE or (len(live) > LIVE // 3 and dice.random() < 0.3):
            removed = live.pop(dice.randrange(len(live)))
            yield Action("finish" if dice.random() < 0.2 else "delete", removed)


class Storm:
    """Executes a plan, some actions at a time."""

    def __init__(self, kube: Kube, namespace: str, actions: list[Action], finish: Callable[[str], bool]) -> None:
        """`finish` lets the containers of a running pod exit, and returns False for a pod that does not run."""
        self._kube, self._namespace, self._finish = kube, namespace, finish
        self._left = list(reversed(actions))
        self.alive: dict[str, str] = {}  # by name: the UID of each pod that must exist
        self.evicted: dict[str, str] = {}  # pods evicted with an event, removed from `alive`
        self.done = 0
        self.created = self.removed = 0

    def __bool__(self) -> bool:
        return bool(self._left)

    def execute(self, count: int) -> None:
        """Execute the next actions."""
        for _ in range(min(count, len(self._left))):
            self._do(self._left.pop())
            self.done += 1
            time.sleep(PACE)

    def _do(self, action: Action) -> None:
        if action.what == "create":
            assert action.manifest is not None
            manifest = action.manifest
            pod = retry(lambda: self._create(manifest), f"creating {action.name}")
            self.alive[action.name] = pod["metadata"]["uid"]
            self.created += 1
            return
        uid = self.alive.pop(action.name, None)
        if uid is None:
            return  # evicted, and no longer in the list
        self.removed += 1
        if action.what == "finish":
            retry(lambda: self._finish(action.name), f"finishing {action.name}")
        retry(lambda: self._delete(action.name, uid), f"deleting {action.name}")

    def _create(self, manifest: Manifest) -> Manifest:
        try:
            return self._kube.create(manifest, self._namespace)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
            return self._kube.get("Pod", manifest["metadata"]["name"], self._namespace)  # its response was lost

    def _delete(self, name: str, uid: str) -> bool:
        try:
            self._kube.delete("Pod", name, self._namespace, only={"uid": uid})
        except ApiError as error:
            if error.status != 404:
                raise
        return True


def retry(work: Callable[[], T], what: str, seconds: float = GIVE_UP) -> T:
    """Retry until the API server accepts the request. A definite rejection is raised."""
    deadline = time.monotonic() + seconds
    while True:
        last: Any
        try:
            return work()
        except ApiError as error:
            if error.status < 500 and error.status not in (401, 403, 409, 429):
                raise
            last = error
        except (OSError, HTTPException) as error:
            last = error
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not done in {seconds:.0f} s: {last}")
        time.sleep(0.1)
