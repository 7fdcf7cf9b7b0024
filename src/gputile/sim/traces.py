"""Parsers of lists of nodes and pods to replay: the openb CSV lists (plain or gzipped), or Kubernetes manifests.

A CSV list counts thousandths of a card, so its cards have a memory of 1000, and the share of a pod is a percentage.
This project contains no such list; the user passes a path.
"""

import csv
import gzip
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gputile.dialects import registry
from gputile.dialects.kube_objects import Pod
from gputile.dialects.parsing import convert_pod, host_needs
from gputile.model.cards import Card, Node
from gputile.model.decode_errors import file_problem
from gputile.model.errors import InputError
from gputile.model.refusals import BadRequest
from gputile.model.requests import Constraints, ContainerRequest, ModelRule, PodRequest, Role
from gputile.sim.manifests import load

THOUSANDTHS = 1000  # of a card

NODE_COLUMNS = ("sn", "cpu_milli", "memory_mib", "gpu", "model")
POD_COLUMNS = ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli")


class Job(msgspec.Struct, frozen=True):
    """A pod of a list, with its run time."""

    name: str
    request: PodRequest
    seconds: float | None = None  # run time; None when the list has none


T = TypeVar("T")


def load_nodes(path: Path) -> tuple[Node, ...]:
    if _is_csv(path):
        nodes = tuple(_rows(path, NODE_COLUMNS, _node))
    else:
        nodes = tuple(_yaml_node(manifest, path) for manifest in load(_text(path), str(path)).nodes)
    twice = [name for name, count in Counter(node.name for node in nodes).items() if count > 1]
    if twice:
        raise InputError(f"{path}: node {twice[0]!r} is defined twice; rename one of the two")
    return nodes


def load_jobs(path: Path, skip: Callable[[str], None] | None = None) -> tuple[Job, ...]:
    """The pods of a list, sorted by name, so that a shuffle with a seed does not depend on the order of the list. An
    invalid manifest is an error, or is skipped and reported to `skip`."""
    jobs = _rows(path, POD_COLUMNS, _job) if _is_csv(path) else _yaml_jobs(path, skip)
    return tuple(sorted(jobs, key=lambda job: job.name))


def _is_csv(path: Path) -> bool:
    return path.name.lower().removesuffix(".gz").endswith(".csv")


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        broken = isinstance(error, EOFError | zlib.error | gzip.BadGzipFile)
        problem = "it is not a complete gzip file" if broken else file_problem(error)
        raise InputError(f"{path}: cannot be read: {problem}; name a .csv, .csv.gz or .yaml file") from error


def _rows(path: Path, columns: tuple[str, ...], make: Callable[[dict[str, str]], T]) -> Iterator[T]:
    lines = csv.DictReader(_text(path).splitlines(), strict=True)
    missing = [column for column in columns if column not in (lines.fieldnames or ())]
    if missing:
        raise InputError(f"{path}, line 1: expected the columns {', '.join(columns)}; missing: {', '.join(missing)}")
    try:
        for row in lines:
            yield make(row)
    except (ValueError, TypeError, AttributeError, csv.Error) as error:
        problem = str(error) if isinstance(error, ValueError) else "the line is not valid CSV"
        expected = f"{', '.join(columns)} with whole numbers, and times in seconds"
        raise InputError(f"{path}, line {lines.line_num}: {problem}; expected {expected}") from error


def _node(row: dict[str, str]) -> Node:
    cards = tuple(
        Card(index=n, uuid=f"{row['sn']}#{n}", memory=THOUSANDTHS, model=row["model"])
        for n in range(_count(row["gpu"]))
    )
    return Node(name=row["sn"], cards=cards, cpu=_count(row["cpu_milli"]), memory=_count(row["memory_mib"]))


def _job(row: dict[str, str]) -> Job:
    cards, share = _count(row["num_gpu"]), _count(row["gpu_milli"])
    if cards and not share:
        raise ValueError("num_gpu without gpu_milli")
    models = tuple(filter(None, (row.get("gpu_spec") or "").split("|")))
    request = PodRequest(
        dialect="vcuda",
        slots=0,  # the lists have none
        asks=_asks(cards, share),
        constraints=Constraints(models=(ModelRule(models),)) if models else Constraints(),
        cpu=_count(row["cpu_milli"]),
        memory=_count(row["memory_mib"]),
    )
    return Job(row["name"], request, _seconds(row))


def _asks(cards: int, share: int) -> tuple[ContainerRequest, ...]:
    if not cards:
        return ()
    if share >= THOUSANDTHS:
        return (ContainerRequest.whole("main", Role.APP, cards),)
    return (ContainerRequest(container="main", cards=cards, memory_percent=-(-share * 100 // THOUSANDTHS)),)


def _count(text: str) -> int:
    try:
        number = int(text)
    except (TypeError, ValueError):
        raise ValueError(f"{text!r} is not a whole number" if text else "a value is missing") from None
    if not 0 <= number < 2**40:
        raise ValueError(f"{text!r} is not an amount")
    return number


def _seconds(row: dict[str, str]) -> float | None:
    """The run time; None for a pod that was never scheduled."""
    start, end = row.get("scheduled_time"), row.get("deletion_time")
    if not start or not end:
        return None
    try:
        seconds = float(end) - float(start)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise ValueError(f"scheduled_time {start!r} or deletion_time {end!r} is not a time")
    return max(0.0, seconds)


def _yaml_node(manifest: dict[str, Any], path: Path) -> Node:
    node = registry.read_node(manifest)
    if isinstance(node, BadRequest):
        raise InputError(f"{path}: {node.message}")
    return node


def _yaml_jobs(path: Path, skip: Callable[[str], None] | None) -> Iterator[Job]:
    for workload in load(_text(path), str(path)).workloads:
        pod = convert_pod(workload.pod)
        request = registry.read_pod(pod) if isinstance(pod, Pod) else pod
        if isinstance(request, BadRequest) or isinstance(pod, BadRequest):
            bad = request if isinstance(request, BadRequest) else pod
            assert isinstance(bad, BadRequest)
            message = f"{path}: {workload.kind} {workload.namespace}/{workload.name}: {bad.message}"
            if skip is None:
                raise InputError(message)
            skip(message)
            continue
        if request is None:  # its CPU and memory count, too
            cpu, memory = host_needs(pod)
            request = PodRequest(dialect="", asks=(), cpu=cpu, memory=memory)
        for number in range(workload.replicas):
            yield Job(f"{workload.namespace}/{workload.name}-{number}", request)
