"""`gputile read`: what each pod of a manifest requests, as gputile reads it."""

import sys
from pathlib import Path
from typing import Any

import click

from gputile.cli.output import say, style
from gputile.cli.render.describe import constraint_lines, describe
from gputile.cli.render.terminal import PROGRAMS, emit, output_option
from gputile.cli.source import unit_option
from gputile.dialects import gpushare
from gputile.dialects.kube_objects import NodeObject
from gputile.dialects.parsing import convert_node
from gputile.dialects.registry import notes, read_pod
from gputile.dialects.settings import DialectSettings
from gputile.model.decode_errors import file_problem
from gputile.model.errors import InputError
from gputile.model.refusals import BadRequest
from gputile.model.requests import ContainerRequest, ModelRule, PodRequest, Role, Strength
from gputile.sim.manifests import Manifests, Workload, load, load_file
from gputile.text.documents import NotYaml, content

EXAMPLES = """\b
Examples:
  gputile read -f pod.yaml
  kubectl get pods -A -o yaml | gputile read -f - -o json
  helm template chart | gputile read -f - --check

\b
Exit codes: 0 read, 1 with --check: a pod is refused, 2 a file could not be read (docs/cli.md).
"""


@click.command("read", epilog=EXAMPLES)
@click.option(
    "-f",
    "--objects",
    "--file",
    "files",
    multiple=True,
    required=True,
    metavar="FILE",
    help="YAML or JSON file, or - for standard input.",
)
@output_option()
@unit_option
@click.option("--check", is_flag=True, help="Exit with 1 if any pod is refused.")
def command(files: tuple[str, ...], output: str, gpushare_unit: Any, check: bool) -> None:
    """Show how gputile reads the pods of a manifest: which GPUs they request.

    Reads pods, and the pod templates of Deployments, StatefulSets, DaemonSets, Jobs, CronJobs and Lists. For each it
    shows the dialect, what every container requests, the constraints, or why it is refused and what to write instead.
    """
    documents = [_load(name) for name in files]
    nodes = [convert_node(node) for manifests in documents for node in manifests.nodes]
    known = [node for node in nodes if isinstance(node, NodeObject)]
    settings = gpushare.resolved(DialectSettings(gpushare_unit=gpushare_unit), known)
    pods = [_pod(workload, settings) for manifests in documents for workload in manifests.workloads]
    passed_over = [kind for manifests in documents for kind in manifests.others]
    if output in PROGRAMS:
        emit({"pods": [_without_request(pod) for pod in pods], "passed_over": passed_over}, output)
    else:
        _print_text(pods, passed_over)
    if check and any(pod["refusal"] for pod in pods):
        raise SystemExit(1)


def _load(name: str) -> Manifests:
    if name != "-":
        return load_file(Path(name))
    try:
        return load(content(sys.stdin.buffer).decode(), "standard input")
    except (UnicodeDecodeError, NotYaml) as error:
        raise InputError(f"standard input: cannot be read: {file_problem(error)}; give it YAML or JSON") from error


# ---- the JSON contract (docs/read.md) -------------------------------------------------------------------------------


def _pod(workload: Workload, settings: DialectSettings) -> dict[str, Any]:
    read = read_pod(workload.pod, settings)
    request = read if isinstance(read, PodRequest) else None
    refusal = {"code": str(read.code), "message": read.message} if isinstance(read, BadRequest) else None
    return {
        "name": workload.name,
        "namespace": workload.namespace,
        "kind": workload.kind,
        "replicas": workload.replicas,
        "dialect": request.dialect if request else None,
        "containers": [_container(ask) for ask in request.asks] if request else [],
        "constraints": _constraints(request) if request else {},
        "cpu_millicores": request.cpu if request else None,
        "main_memory_mib": request.memory if request else None,
        "warnings": list(notes(workload.pod, request)) if request else [],
        "refusal": refusal,
        "request": request,
    }


def _without_request(pod: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in pod.items() if key != "request"}


def _container(ask: ContainerRequest) -> dict[str, Any]:
    return {
        "name": ask.container,
        "init": ask.role is not Role.APP,
        "sidecar": ask.role is Role.SIDECAR,
        "cards": ask.cards,
        "memory_mib": ask.memory,
        "memory_percent": ask.memory_percent,
        "cores": ask.cores,
        "exclusive": ask.exclusive,
    }


def _constraints(request: PodRequest) -> dict[str, Any]:
    """Only the constraints that the pod has; an empty object is a pod that fits any GPU."""
    rule = request.constraints
    constraints: dict[str, Any] = {
        "models": _names(rule.models[:1]),
        "and_models": [_names((models,)) for models in rule.models[1:]],  # a second list that must match too
        "not_models": _names(rule.not_models),
        "uuids": sorted(rule.uuids),
        "not_uuids": sorted(rule.not_uuids),
        "modes": sorted(rule.modes),
        "numa": "" if rule.numa is Strength.NO else str(rule.numa),
        "links": "" if rule.links is Strength.NO else str(rule.links),
        "idle": rule.idle,
        "same_cards": request.together and sum(bool(ask.cards) for ask in request.asks) > 1,
        "node_policy": rule.node_policy,
        "card_policy": rule.card_policy,
    }
    return {key: value for key, value in constraints.items() if value}


def _names(rules: tuple[ModelRule, ...]) -> list[str]:
    return [name for rule in rules for name in rule.names]


# ---- the text -------------------------------------------------------------------------------------------------------


def _print_text(pods: list[dict[str, Any]], others: list[str]) -> None:
    for pod in pods:
        title = f"{pod['kind']} {pod['namespace']}/{pod['name']}"
        request = pod["request"]
        if pod["refusal"]:
            say(f"{title}: {style('refused', fg='red')} ({pod['refusal']['code']})")
            say(f"  {pod['refusal']['message']}")
        elif request is None:
            say(f"{title}: requests no GPU")
        else:
            say(f"{title}: {style(request.dialect, fg='green')}{_times(pod['replicas'])}")
            for line in (*_container_lines(request), *constraint_lines(request.constraints)):
                say(f"  {line}")
        for warning in pod["warnings"]:
            say(f"  {style('note', fg='yellow')}: {warning}")
    if not pods:
        say("no pods found")
    if others:
        say(f"ignored, because they create no pods that gputile knows: {', '.join(others)}")


def _times(replicas: int) -> str:
    return f", {replicas} times" if replicas != 1 else ""


def _container_lines(request: PodRequest) -> list[str]:
    lines = [f"{_role(ask)} {ask.container}: {describe(ask)}" for ask in request.asks]
    if request.together and sum(bool(ask.cards) for ask in request.asks) > 1:
        lines.append("all containers share the same GPU or GPUs")
    return lines


def _role(ask: ContainerRequest) -> str:
    return {Role.APP: "container", Role.INIT: "init container", Role.SIDECAR: "sidecar"}[ask.role]
