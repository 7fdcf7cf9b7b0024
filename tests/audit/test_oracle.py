"""Random records of all families against a third opinion: the sums of the audit equal those of a small oracle.

The oracle knows requests and records as plain tuples, never as annotations: the encoders below write them onto pods.
Copied records, records of two families on one pod, records smaller than the request and unreadable requests are all
drawn.
"""

import json
from collections import Counter
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tests.audit.nodes import SIZE, Json, gpushare, hami, look, node, ours, pod, vgpu
from tests.effort import examples

GPUS = 3
FAMILIES = ("hami", "vgpu", "vcuda", "gpushare", "nano")  # in the order in which records of other families count
INDEX_ONLY = ("vcuda", "nano")  # these name the GPU, and the request has the amounts
NODE_KEY = ("hami", "vgpu", "vcuda")
Tile = tuple[int, int, int]  # GPU, memory, cores


class Container(msgspec.Struct):
    """A container and its request."""

    init: bool
    gpus: int
    memory: int  # with no cores either: the whole GPU
    cores: int


class Record(msgspec.Struct):
    """The record of one family on the pod."""

    family: str
    tiles: list[list[Tile]]  # by container
    copied: bool  # from a pod of another node
    early: bool = False  # HAMi's before 2.9, without entries for init containers


class Case(msgspec.Struct):
    """A pod on a node, with its records."""

    agent: str
    dialect: str  # of the request
    odd: bool  # the request is unreadable
    containers: list[Container]
    records: list[Record]
    old: bool  # the pod started before our own agent served the node


# ---- the oracle -----------------------------------------------------------------------------------------------------


def expected(case: Case) -> tuple[Counter[Any], tuple[int, int, int]]:
    """Memory and cores by GPU; and whole GPUs, shares and their memory on unknown GPUs."""
    mine = case.agent == "gputile"
    records = sorted(case.records, key=lambda record: (record.family != case.agent, FAMILIES.index(record.family)))
    record = next((candidate for candidate in records if valid(candidate)), None) if case.old or not mine else None
    if record is None and mine and not case.old:
        return Counter(), (0, 0, 0)
    compared = (not mine or record is None) and not (case.odd and record is not None)
    phases: list[Counter[Any]] = [Counter()]
    for at, container in enumerate(case.containers):
        held = hold(case, container, record, at, compared)
        phases.append(held) if container.init else phases[0].update(held)
    most: Counter[Any] = Counter()
    for phase in phases:
        most |= phase
    rest = (most.pop("whole", 0), most.pop("shares", 0), most.pop("memory", 0))
    return most, rest


def valid(record: Record) -> bool:
    tiles = [tile for tiles in record.tiles for tile in tiles]
    exact = record.family not in INDEX_ONLY
    fits = all(gpu < GPUS and not (exact and (memory > SIZE or cores > 100)) for gpu, memory, cores in tiles)
    return bool(tiles) and fits and not (record.copied and record.family in NODE_KEY)


def hold(case: Case, container: Container, record: Record | None, at: int, compared: bool) -> Counter[Any]:
    held: Counter[Any] = Counter()
    memory, cores = amounts(case, container)
    tiles = record.tiles[at] if record else []
    named = list(dict.fromkeys(tile[0] for tiles_of_one in record.tiles for tile in tiles_of_one)) if record else []
    own = {tile[0] for tile in tiles}
    rest = container.gpus - len(tiles)
    for gpu, held_memory, held_cores in tiles:
        if record is not None and record.family in INDEX_ONLY:
            held_memory, held_cores = (memory, cores) if container.gpus else (0, 0)
        elif container.gpus and compared:
            held_memory, held_cores = max(held_memory, memory), max(held_cores, cores)
        held.update({("memory", gpu): held_memory, ("cores", gpu): held_cores})
    if record is not None and (record.family == "gpushare" or (container.init and compared)):
        for gpu in [gpu for gpu in named if gpu not in own][: max(rest, 0)]:
            held.update({("memory", gpu): memory, ("cores", gpu): cores})
            rest -= 1
    if rest > 0 and compared:
        is_whole = (memory, cores) == (SIZE, 100)
        held.update({"whole": rest} if is_whole else {"shares": rest, "memory": rest * memory})
    return held


def amounts(case: Case, container: Container) -> tuple[int, int]:
    if case.odd or (not container.memory and not container.cores):
        return SIZE, 100
    return container.memory or SIZE, container.cores


# ---- onto pods and nodes --------------------------------------------------------------------------------------------

NODES = {
    "gputile": ours("n#0", "n#1", "n#2", since="2027-01-15T07:30:00Z"),
    "hami": hami("n#0", "n#1", "n#2"),
    "vgpu": vgpu("n#0", "n#1", "n#2"),
    "gpushare": gpushare(SIZE, GPUS),
    "nano": node("n", {"elasticgpu.io/gpu-core": 100 * GPUS, "elasticgpu.io/gpu-memory": SIZE * GPUS}),
    "vcuda": node("n", {"nvidia.com/vcuda-core": 100 * GPUS, "nvidia.com/vcuda-memory": SIZE * GPUS}),
}


def limits(case: Case, container: Container) -> Json:
    if not container.gpus:
        return {}
    names = {
        "hami": ("nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpucores"),
        "vgpu": ("nvidia.com/vgpu-number", "nvidia.com/vgpu-memory", "nvidia.com/vgpu-cores"),
        "gputile": ("gputile.io/gpu", "gputile.io/memory", "gputile.io/cores"),
    }
    count, memory, cores = names[case.dialect]
    amounts = {count: container.gpus} | ({memory: container.memory} if container.memory else {})
    return amounts | ({cores: container.cores} if container.cores else {}) | ({memory: 10**7} if case.odd else {})


def notes(case: Case, record: Record) -> dict[str, str]:
    """The record as its family writes it. Containers are `i0`, `i1`, ... and then `c0`, `c1`, ..."""
    inits = sum(container.init for container in case.containers)
    names = [f"i{n}" if n < inits else f"c{n - inits}" for n in range(len(case.containers))]
    on = "m" if record.copied else "n"
    match record.family:
        case "hami":
            entries = record.tiles[inits:] if record.early else record.tiles
            value = "".join("".join(f"n#{g},NVIDIA,{m},{c}:" for g, m, c in tiles) + ";" for tiles in entries)
            return {"hami.io/vgpu-devices-allocated": value, "hami.io/vgpu-node": on}
        case "vgpu":
            parts = [
                (name, ",".join(f"{g}_n#{g}_{c}_{m}" for g, m, c in t))
                for name, t in zip(names, record.tiles, strict=True)
            ]
            value = ";".join(f"{name}[{tiles}]" for name, tiles in parts if tiles)
            return {"nvidia.com/pre-allocated": value, "nvidia.com/predicate-node": on}
        case "gpushare":
            by_number = {
                number(at, inits, len(names)): {str(g): m for g, m, _ in t} for at, t in enumerate(record.tiles) if t
            }
            return {"scheduler.framework.gpushare.allocation": json.dumps(by_number)}
        case "nano":
            by_name = {f"elasticgpu.io/container-{n}": joined(t) for n, t in zip(names, record.tiles, strict=True) if t}
            return {"elasticgpu.io/assumed": "true", **by_name}
    by_container = {
        f"tencent.com/predicate-gpu-idx-{number(at, inits, len(names))}": joined(t)
        for at, t in enumerate(record.tiles)
        if t
    }
    return {**by_container, "tencent.com/predicate-node": on}


def number(at: int, inits: int, total: int) -> str:
    """App containers count from 0."""
    return str(at - inits if at >= inits else total - inits + at)


def joined(tiles: list[Tile]) -> str:
    return ",".join(str(tile[0]) for tile in tiles)


# ---- drawing --------------------------------------------------------------------------------------------------------

AMOUNT, PERCENT = st.integers(0, 18).map(lambda n: n * 500), st.sampled_from([0, 20, 60])
TILES = st.tuples(
    st.integers(0, 12).map(lambda n: n // 4),  # the node lacks the last one
    st.integers(1, 33).map(lambda n: n * 500),  # the last one is more than a GPU has
    st.integers(0, 11).map(lambda n: min(n * 10, 101)),  # and here too
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    inits, apps = draw(st.integers(0, 2)), draw(st.integers(1, 3))
    containers = [
        Container(at < inits, draw(st.integers(0, 2)), draw(AMOUNT), draw(PERCENT)) for at in range(inits + apps)
    ]
    families = draw(st.lists(st.sampled_from(FAMILIES), max_size=2, unique=True))
    return Case(
        agent=draw(st.sampled_from(list(NODES))),
        dialect=draw(st.sampled_from(["hami", "vgpu", "gputile"])),
        odd=draw(st.booleans()) and draw(st.booleans()),
        containers=containers,
        records=[draw(records(family, len(containers), inits)) for family in families],
        old=draw(st.booleans()),
    )


@st.composite
def records(draw: st.DrawFn, family: str, containers: int, inits: int) -> Record:
    """In a gpushare or index-only record a container names each GPU once; gpushare reserves no cores."""
    once = family in ("gpushare", *INDEX_ONLY)
    tiles_by_container = [
        draw(st.lists(TILES, max_size=2, unique_by=(lambda tile: tile[0]) if once else None)) for _ in range(containers)
    ]
    if family == "gpushare":
        tiles_by_container = [[(gpu, memory, 0) for gpu, memory, _ in tiles] for tiles in tiles_by_container]
    early = family == "hami" and draw(st.booleans())
    if early:
        tiles_by_container[:inits] = [[] for _ in range(inits)]
    return Record(family, tiles_by_container, draw(st.booleans()) and draw(st.booleans()), early)


@examples(400)
@given(cases())
def test_the_sums_of_the_audit_are_those_of_the_oracle(case: Case) -> None:
    inits = [limits(case, container) for container in case.containers if container.init]
    apps = [limits(case, container) for container in case.containers if not container.init]
    written = {key: value for record in case.records for key, value in notes(case, record).items()}
    started = "2027-01-15T07:00:00Z" if case.old else "2027-01-15T07:45:00Z"
    report = look(NODES[case.agent], pod(*apps, init=tuple(inits), notes=written, started=started))
    most, rest = expected(case)
    sums = {(name, gpu.index): getattr(gpu, f"{name}_allocated") for gpu in report.gpus for name in ("memory", "cores")}
    assert sums == {key: most[key] for key in sums}
    assert [(pod.gpus, pod.shares, pod.memory) for pod in report.unplaced] == ([rest] if any(rest) else [])
