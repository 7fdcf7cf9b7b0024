"""Fuzzes the extender verbs: no body may crash a verb, get a 5xx, or change the ledger.

It starts from the bodies that kube-scheduler sends to each verb and corrupts them: bytes are flipped, cut, doubled and
spliced; keys are dropped, doubled in another case and get values of other types, deep and huge ones too. Most bodies go
to the verbs directly, a share over a real connection. The cluster does not know the pods in them, so no call, however
well-formed, may leave a trace.
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

from bench.fuzz.finding import SLOW, Finding, Report, silent
from bench.fuzz.mutator import Mutator
from gputile.kube.api import Json
from gputile.kube.fake import MemoryApi
from gputile.scheduler.app import SchedulerApp
from gputile.scheduler.extender.server import _error, routes
from gputile.scheduler.extender_api import BadBody
from gputile.scheduler.settings import Settings, TellSettings
from gputile.telemetry.metrics import Metrics
from gputile.testing.builders import node, pod

OVER_HTTP = 0.05  # of the bodies


# ---- the target -----------------------------------------------------------------------------------------------------

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
    return MemoryApi([*nodes, node("bare").manifest()], [*bound, pod(LIMITS[0], name="pending", uid="uid-pending")])


class Target:
    """A running scheduler on an in-memory cluster, and its state, which must not change."""

    def __init__(self, process: SchedulerApp, api: MemoryApi, http: aiohttp.ClientSession) -> None:
        self._process, self._api, self._http = process, api, http
        self._verbs = process.server._verbs
        self._before = self._ledger_state()
        self._pods = msgspec.json.encode(api.pods)

    def _ledger_state(self) -> tuple[Any, ...]:
        ledger = self._process.ledger
        entries = {entry.allocation.pod: entry for entry in ledger.entries()}
        return entries, [ledger.fleet.view(name) for name in sorted(ledger.fleet.names())]

    async def problem(self, path: str, body: bytes, *, over_http: bool) -> str:
        """The problem with the response or with the state after it; "" if there is none."""
        start_time = time.perf_counter()
        try:
            response = await (self._post(path, body) if over_http else self._call(path, body))
        except Exception as crash:
            return f"{type(crash).__name__}: {crash}"
        took = time.perf_counter() - start_time
        if took > SLOW:
            return f"took {took:.1f} s"
        return malformed(routes()[path], response) or self._changed()

    async def _call(self, path: str, body: bytes) -> bytes:
        try:
            response = self._verbs[path](body)
            return response if isinstance(response, bytes) else await response
        except BadBody as bad:
            return _error(routes()[path], str(bad))

    async def _post(self, path: str, body: bytes) -> bytes:
        url = f"http://127.0.0.1:{self._process.server.port}{path}"
        async with self._http.post(url, data=_pieces(body)) as response:
            if response.status != 200:
                raise RuntimeError(f"HTTP {response.status}")
            return await response.read()

    def _changed(self) -> str:
        if self._ledger_state() != self._before:
            return "the ledger has changed"
        return ""

    def audit(self) -> str:
        """Slower checks, once in a while."""
        self._process.ledger.check()
        return "" if msgspec.json.encode(self._api.pods) == self._pods else "a pod in the cluster has changed"


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 2**16):
        yield body[start : start + 2**16]


@asynccontextmanager
async def target() -> AsyncIterator[Target]:
    api = cluster()
    quiet_settings = TellSettings(nudge=False)  # otherwise the pending pod is nudged after a while, whatever is sent
    process = SchedulerApp(api, Settings(listen="127.0.0.1:0", tell=quiet_settings), Metrics())
    stop = asyncio.Event()
    running = asyncio.create_task(process.run(stop))
    async with aiohttp.ClientSession() as http:
        try:
            while not (process.is_synced() and process.server.port and not process.cluster_state.ungranted):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)  # the leader's grants arrive through the watch
            yield Target(process, api, http)
        finally:
            stop.set()
            await running


FILTER = {"Nodes", "NodeNames", "FailedNodes", "FailedAndUnresolvableNodes", "Error"}


def malformed(verb: str, response: bytes) -> str:
    """Why kube-scheduler could not decode the response; "" if it can."""
    try:
        result = json.loads(response)
    except (ValueError, RecursionError) as error:
        return f"the response is not JSON: {error}"
    match verb:
        case "bind":
            good = isinstance(result, dict) and set(result) == {"Error"} and isinstance(result["Error"], str)
        case "prioritize":
            good = isinstance(result, list) and all(set(score) == {"Host", "Score"} for score in result)
            good = good and all(0 <= score["Score"] <= 10 for score in result)
        case "preempt":
            good = isinstance(result, dict) and isinstance(result.get("NodeNameToMetaVictims"), dict)
            victims = result["NodeNameToMetaVictims"].values() if good else ()
            good = good and all(set(entry) == {"Pods", "NumPDBViolations"} for entry in victims)
        case _:
            good = isinstance(result, dict) and set(result) == FILTER and isinstance(result["Error"], str)
            good = good and all(isinstance(result[key], dict) for key in ("FailedNodes", "FailedAndUnresolvableNodes"))
    return "" if good else f"the response has another shape: {response[:200]!r}"


# ---- valid bodies ---------------------------------------------------------------------------------------------------


def good_bodies() -> list[tuple[str, bytes]]:
    """The bodies that kube-scheduler sends, by path; the cluster knows only some of their pods and nodes."""
    bodies: list[tuple[str, Any]] = []
    names = [*NODES, "unknown"]
    whole = {"metadata": {}, "items": [*cluster().nodes.values(), node("later").card(size=64).manifest()]}
    for number, limits in enumerate(LIMITS):
        unknown_pod = pod(limits, name=f"new-{number}", uid=f"uid-new-{number}", init=({"cpu": "1"},))
        unknown_pod["spec"]["priority"] = 5
        victims = {"n1": {"Pods": [{"UID": "uid-old-0"}], "NumPDBViolations": 1}, "shared": {"Pods": None}}
        pods = {"n1": {"Pods": [pod(LIMITS[0], name="old-0", uid="uid-old-0", on="n1")], "NumPDBViolations": 0}}
        bind = {"PodName": f"bound-{number}", "PodNamespace": "default", "PodUID": f"uid-bound-{number}", "Node": "n1"}
        bodies += [
            ("/gputile/filter", {"Pod": unknown_pod, "Nodes": None, "NodeNames": names}),
            ("/scheduler/filter", {"Pod": unknown_pod, "Nodes": whole, "NodeNames": None}),
            ("/gputile/filter-dryrun", {"Pod": unknown_pod, "Nodes": whole, "NodeNames": None}),
            ("/scheduler/filter-dryrun", {"pod": unknown_pod, "nodenames": names}),
            ("/scheduler/priorities", {"Pod": unknown_pod, "Nodes": None, "NodeNames": names}),
            ("/gputile/preempt", {"Pod": unknown_pod, "NodeNameToVictims": None, "NodeNameToMetaVictims": victims}),
            ("/scheduler/preempt", {"Pod": unknown_pod, "NodeNameToVictims": pods, "NodeNameToMetaVictims": None}),
            ("/gpushare-scheduler/bind", bind),
        ]
    return [(path, json.dumps(body).encode()) for path, body in bodies]


# ---- corruption -----------------------------------------------------------------------------------------------------


class BodyGenerator:
    """The random generator of one body, so that it can be reproduced alone."""

    def __init__(self, seed: int, number: int, good: list[tuple[str, bytes]]) -> None:
        self._rng, self._good = random.Random(f"{seed}:{number}"), good
        self._mutator = Mutator(self._rng, [body for _, body in good])
        self.over_http = self._rng.random() < OVER_HTTP

    def body(self) -> tuple[str, bytes]:
        path, body = self._rng.choice(self._good)
        if self._rng.random() < 0.03:
            path = self._rng.choice(self._good)[0]  # of another verb
        for _ in range(self._mutator.times()):
            body = self._mutator.mutate(body)
        return path, body


# ---- running --------------------------------------------------------------------------------------------------------


async def run(
    bodies: int,
    seed: int,
    *,
    first: int = 0,
    most: int = 10,
    report: Report = silent,
) -> list[Finding]:
    """The findings, `most` at most."""
    good, findings, start_time = good_bodies(), list[Finding](), time.monotonic()
    async with target() as instance:
        for path, body in good:  # a valid body is no finding and leaves no trace
            await _try(
                instance, Finding(target="verbs", seed=seed, number=-1, path=path, body=body, why=""), False, findings
            )
        for number in range(first, first + bodies):
            rng = BodyGenerator(seed, number, good)
            path, body = rng.body()
            tried = Finding(target="verbs", seed=seed, number=number, path=path, body=body, why="")
            await _try(instance, tried, rng.over_http, findings)
            if number % 1000 == 999:
                await asyncio.sleep(0)
                if why := instance.audit():
                    findings.append(msgspec.structs.replace(tried, why=f"{why}, since body {number - 999}"))
            if number % 10_000 == 9_999:
                report(
                    f"verbs: {number + 1:>8,} bodies, {time.monotonic() - start_time:5.0f} s, {len(findings)} findings"
                )
            if len(findings) >= most:
                break
        if why := instance.audit():
            findings.append(Finding(target="verbs", seed=seed, number=first, path="", body=b"", why=why))
    return findings


async def _try(instance: Target, tried: Finding, over_http: bool, findings: list[Finding]) -> None:
    why = await instance.problem(tried.path, tried.body, over_http=over_http)
    if why:
        findings.append(msgspec.structs.replace(tried, why=why))
