"""Bodies that no kube-scheduler would send: none may crash a verb, be answered with 5xx, or change the book.

Starts from what kube-scheduler does send to every verb and spoils it: bytes are flipped, cut, doubled and spliced; keys
are dropped, doubled in another case and given values of other kinds, deep and huge ones among them. Most bodies go to
the verbs directly, a share over a real connection. The pods in them are strangers to the cluster, so nothing that is
asked about them, however well-formed, may leave a trace.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from bench.fuzz.finding import SLOW, Finding, Tell, silent
from bench.fuzz.spoiling import Spoiler
from gputile.kube.api import Json
from gputile.kube.fake import MemoryApi
from gputile.scheduler.app import SchedulerApp
from gputile.scheduler.extender.server import _error, routes
from gputile.scheduler.extender_api import BadBody
from gputile.scheduler.settings import Settings, TellSettings
from gputile.telemetry.metrics import Metrics
from gputile.testing.builders import node, pod

OVER_HTTP = 0.05  # of the bodies


# ---- where the bodies go --------------------------------------------------------------------------------------------

NODES = ("n1", "n2", "shared", "bare")
LIMITS: tuple[Json, ...] = (
    {"gputile.io/gpu": 1, "gputile.io/memory": 4, "gputile.io/cores": 10, "cpu": "500m", "memory": "1Gi"},
    {"gputile.io/gpu": 2},
    {"aliyun.com/gpu-mem": 1},
    {"nano-gpu.io/gpu-core": 20, "nano-gpu.io/gpu-memory": 1},
    {"tencent.com/vcuda-core": 20, "tencent.com/vcuda-memory": 4},
    {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3, "nvidia.com/gpucores": 30},
    {"nvidia.com/gpu": 1},
    {"nvidia.com/vgpu-number": 1, "nvidia.com/vgpu-memory": 9},
    {"gputile.io/gpu": 9, "gputile.io/memory": 2**20},
    {"cpu": "1"},
)


def cluster() -> MemoryApi:
    shared = {"aliyun.com/gpu-mem": 32, "aliyun.com/gpu-count": 2, "cpu": "64", "memory": "64Gi"}
    nodes = [node(name).cards(2, size=16).manifest() for name in ("n1", "n2")]
    nodes += [{"metadata": {"name": "shared"}, "status": {"capacity": shared, "allocatable": shared}}]
    bound = [pod(LIMITS[0], name=f"old-{n}", uid=f"uid-old-{n}", on="n1") for n in range(2)]
    index = {"ALIYUN_COM_GPU_MEM_IDX": "1"}
    bound += [pod(LIMITS[2], name="old-share", uid="uid-old-share", annotations=index, on="shared")]
    return MemoryApi([*nodes, node("bare").manifest()], [*bound, pod(LIMITS[0], name="waits", uid="uid-waits")])


class Target:
    """A running scheduler on a cluster in memory, and what must not change about it."""

    def __init__(self, process: SchedulerApp, api: MemoryApi, http: aiohttp.ClientSession) -> None:
        self._process, self._api, self._http = process, api, http
        self._verbs = process.server._verbs
        self._before = self._book()
        self._pods = msgspec.json.encode(api.pods)

    def _book(self) -> tuple[Any, ...]:
        ledger = self._process.ledger
        entries = {entry.allocation.pod: entry for entry in ledger.entries()}
        return entries, [ledger.fleet.view(name) for name in sorted(ledger.fleet.names())]

    async def wrong(self, path: str, body: bytes, *, over_http: bool) -> str:
        """What is wrong with the answer, or with what it left behind; "" if nothing is."""
        begun = time.perf_counter()
        try:
            answer = await (self._post(path, body) if over_http else self._ask(path, body))
        except Exception as crash:
            return f"{type(crash).__name__}: {crash}"
        took = time.perf_counter() - begun
        if took > SLOW:
            return f"took {took:.1f} s"
        return misshapen(routes()[path], answer) or self._changed()

    async def _ask(self, path: str, body: bytes) -> bytes:
        try:
            answer = self._verbs[path](body)
            return answer if isinstance(answer, bytes) else await answer
        except BadBody as bad:
            return _error(routes()[path], str(bad))

    async def _post(self, path: str, body: bytes) -> bytes:
        url = f"http://127.0.0.1:{self._process.server.port}{path}"
        async with self._http.post(url, data=_pieces(body)) as response:
            if response.status != 200:
                raise RuntimeError(f"HTTP {response.status}")
            return await response.read()

    def _changed(self) -> str:
        if self._book() != self._before:
            return "the book has changed"
        return ""

    def audit(self) -> str:
        """Slower looks, once in a while."""
        self._process.ledger.check()
        return "" if msgspec.json.encode(self._api.pods) == self._pods else "a pod in the cluster has changed"


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 2**16):
        yield body[start : start + 2**16]


@asynccontextmanager
async def target() -> AsyncIterator[Target]:
    api = cluster()
    still = TellSettings(nudge=False)  # else the pod that waits is touched after a while, whatever is sent
    process = SchedulerApp(api, Settings(listen="127.0.0.1:0", tell=still), Metrics())
    stop = asyncio.Event()
    running = asyncio.create_task(process.run(stop))
    async with aiohttp.ClientSession() as http:
        try:
            while not (process.is_synced() and process.server.port and not process.cluster_state.ungranted):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)  # what the leader granted comes back through the watch
            yield Target(process, api, http)
        finally:
            stop.set()
            await running


FILTER = {"Nodes", "NodeNames", "FailedNodes", "FailedAndUnresolvableNodes", "Error"}


def misshapen(verb: str, answer: bytes) -> str:
    """What kube-scheduler could not read in it."""
    try:
        said = json.loads(answer)
    except (ValueError, RecursionError) as wrong:
        return f"the answer is no JSON: {wrong}"
    match verb:
        case "bind":
            good = isinstance(said, dict) and set(said) == {"Error"} and isinstance(said["Error"], str)
        case "prioritize":
            good = isinstance(said, list) and all(set(one) == {"Host", "Score"} for one in said)
            good = good and all(0 <= one["Score"] <= 10 for one in said)
        case "preempt":
            good = isinstance(said, dict) and isinstance(said.get("NodeNameToMetaVictims"), dict)
            victims = said["NodeNameToMetaVictims"].values() if good else ()
            good = good and all(set(one) == {"Pods", "NumPDBViolations"} for one in victims)
        case _:
            good = isinstance(said, dict) and set(said) == FILTER and isinstance(said["Error"], str)
            good = good and all(isinstance(said[key], dict) for key in ("FailedNodes", "FailedAndUnresolvableNodes"))
    return "" if good else f"the answer has another shape: {answer[:200]!r}"


# ---- good bodies ----------------------------------------------------------------------------------------------------


def good_bodies() -> list[tuple[str, bytes]]:
    """What kube-scheduler sends, by path; about pods and nodes some of which the cluster does not know."""
    found: list[tuple[str, Any]] = []
    names = [*NODES, "stranger"]
    whole = {"metadata": {}, "items": [*cluster().nodes.values(), node("later").card(size=64).manifest()]}
    for number, limits in enumerate(LIMITS):
        stranger = pod(limits, name=f"new-{number}", uid=f"uid-new-{number}", init=({"cpu": "1"},))
        stranger["spec"]["priority"] = 5
        victims = {"n1": {"Pods": [{"UID": "uid-old-0"}], "NumPDBViolations": 1}, "shared": {"Pods": None}}
        pods = {"n1": {"Pods": [pod(LIMITS[0], name="old-0", uid="uid-old-0", on="n1")], "NumPDBViolations": 0}}
        bind = {"PodName": f"bound-{number}", "PodNamespace": "default", "PodUID": f"uid-bound-{number}", "Node": "n1"}
        found += [
            ("/gputile/filter", {"Pod": stranger, "Nodes": None, "NodeNames": names}),
            ("/scheduler/filter", {"Pod": stranger, "Nodes": whole, "NodeNames": None}),
            ("/gputile/filter-dryrun", {"Pod": stranger, "Nodes": whole, "NodeNames": None}),
            ("/scheduler/filter-dryrun", {"pod": stranger, "nodenames": names}),
            ("/scheduler/priorities", {"Pod": stranger, "Nodes": None, "NodeNames": names}),
            ("/gputile/preempt", {"Pod": stranger, "NodeNameToVictims": None, "NodeNameToMetaVictims": victims}),
            ("/scheduler/preempt", {"Pod": stranger, "NodeNameToVictims": pods, "NodeNameToMetaVictims": None}),
            ("/gpushare-scheduler/bind", bind),
        ]
    return [(path, json.dumps(body).encode()) for path, body in found]


# ---- spoiling them --------------------------------------------------------------------------------------------------


class Dice:
    """One body's own, so that it can be thrown again alone."""

    def __init__(self, seed: int, number: int, good: list[tuple[str, bytes]]) -> None:
        self._dice, self._good = random.Random(f"{seed}:{number}"), good
        self._spoiler = Spoiler(self._dice, [body for _, body in good])
        self.over_http = self._dice.random() < OVER_HTTP

    def body(self) -> tuple[str, bytes]:
        path, body = self._dice.choice(self._good)
        if self._dice.random() < 0.03:
            path = self._dice.choice(self._good)[0]  # meant for another verb
        for _ in range(self._spoiler.times()):
            body = self._spoiler.spoil(body)
        return path, body


# ---- running --------------------------------------------------------------------------------------------------------


async def run(
    bodies: int,
    seed: int,
    *,
    first: int = 0,
    most: int = 10,
    tell: Tell = silent,
) -> list[Finding]:
    """The findings, `most` at most."""
    good, findings, begun = good_bodies(), list[Finding](), time.monotonic()
    async with target() as asked:
        for path, body in good:  # a good body is no finding either, nor does it leave a trace
            await _try(
                asked, Finding(target="verbs", seed=seed, number=-1, path=path, body=body, why=""), False, findings
            )
        for number in range(first, first + bodies):
            dice = Dice(seed, number, good)
            path, body = dice.body()
            tried = Finding(target="verbs", seed=seed, number=number, path=path, body=body, why="")
            await _try(asked, tried, dice.over_http, findings)
            if number % 1000 == 999:
                await asyncio.sleep(0)
                if why := asked.audit():
                    findings.append(msgspec.structs.replace(tried, why=f"{why}, since body {number - 999}"))
            if number % 10_000 == 9_999:
                tell(f"verbs: {number + 1:>8,} bodies, {time.monotonic() - begun:5.0f} s, {len(findings)} findings")
            if len(findings) >= most:
                break
        if why := asked.audit():
            findings.append(Finding(target="verbs", seed=seed, number=first, path="", body=b"", why=why))
    return findings


async def _try(asked: Target, tried: Finding, over_http: bool, findings: list[Finding]) -> None:
    why = await asked.wrong(tried.path, tried.body, over_http=over_http)
    if why:
        findings.append(msgspec.structs.replace(tried, why=why))
