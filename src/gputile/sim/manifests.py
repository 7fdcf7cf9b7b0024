"""Parser of Kubernetes manifest files: several documents, lists, and the objects that create pods."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from gputile.model.decode_errors import file_problem
from gputile.model.errors import InputError
from gputile.text.documents import NotYaml, content, read_all

_TEMPLATE_AT: dict[str, tuple[str, ...]] = {
    "Deployment": ("spec", "template"),
    "ReplicaSet": ("spec", "template"),
    "ReplicationController": ("spec", "template"),
    "StatefulSet": ("spec", "template"),
    "DaemonSet": ("spec", "template"),
    "Job": ("spec", "template"),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
    "PodTemplate": ("template",),
}


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """An object that creates pods, and the pod that it creates."""

    kind: str
    name: str
    namespace: str
    replicas: int
    pod: dict[str, Any]


class Manifests(msgspec.Struct, frozen=True, kw_only=True):
    """The content of one or more documents."""

    workloads: tuple[Workload, ...] = ()
    nodes: tuple[dict[str, Any], ...] = ()
    others: tuple[str, ...] = ()  # kinds that create no pods


def load_file(path: Path) -> Manifests:
    try:
        with path.open("rb") as file:
            text = content(file).decode()
    except (OSError, UnicodeDecodeError, NotYaml) as error:
        raise InputError(f"{path}: cannot be read: {file_problem(error)}; name a YAML or JSON file") from error
    return load(text, str(path))


def load(text: str, source: str) -> Manifests:
    """Parse workloads and nodes. Error messages name `source`."""
    objects = every_object(text, source)
    return Manifests(
        workloads=tuple(w for manifest in objects if (w := _workload(manifest)) is not None),
        nodes=tuple(manifest for manifest in objects if manifest.get("kind") == "Node"),
        others=tuple(
            str(manifest.get("kind") or "an object without kind")
            for manifest in objects
            if manifest.get("kind") != "Node" and _workload(manifest) is None
        ),
    )


def every_object(text: str, source: str) -> list[dict[str, Any]]:
    """All objects of any kind, from all documents and lists."""
    form = "JSON" if source.endswith(".json") else "YAML or JSON" if text.lstrip()[:1] == "{" else "YAML"
    try:
        documents = read_all(text)
    except NotYaml as error:
        where = f"{source}, line {error.line}" if error.line else source
        raise InputError(f"{where}: invalid {form}: {error.problem}; correct the file and try again") from error
    return [manifest for document in documents for manifest in _objects(document, source)]


def _objects(document: Any, source: str) -> Iterator[dict[str, Any]]:
    if document is None:
        return
    if not isinstance(document, dict):
        raise InputError(
            f"{source}: expected a Kubernetes object, found {type(document).__name__}; write `kind: Pod` ..."
        )
    items = document.get("items")
    if str(document.get("kind", "")).endswith("List") and isinstance(items, list):
        kind = str(document["kind"]).removesuffix("List")
        for item in items:
            if isinstance(item, dict):  # items of a PodList may lack their kind
                yield from _objects({"kind": kind, **item} if kind else item, source)
            else:
                yield {"kind": f"{type(item).__name__} in a list"}
        return
    yield document


def _workload(manifest: dict[str, Any]) -> Workload | None:
    kind = manifest.get("kind")
    if kind == "Pod":
        return _workload_of(manifest, manifest, 1)
    if not isinstance(kind, str) or kind not in _TEMPLATE_AT:
        return None
    template: Any = manifest
    spec: Any = None
    for key in _TEMPLATE_AT[kind]:
        spec, template = template, template.get(key) if isinstance(template, dict) else None
    replicas = spec.get("replicas", spec.get("parallelism", 1)) if isinstance(spec, dict) else 1
    return _workload_of(manifest, template, replicas if isinstance(replicas, int) else 1)


def _workload_of(owner: dict[str, Any], pod: Any, replicas: int) -> Workload:
    """A template that is missing or not an object becomes an invalid pod, so that parsing the pod rejects it."""
    metadata = owner.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    return Workload(
        kind=str(owner["kind"]),
        name=str(metadata.get("name") or metadata.get("generateName") or ""),
        namespace=str(metadata.get("namespace") or "default"),
        replicas=max(0, replicas),
        pod={"spec": "missing", **(pod if isinstance(pod, dict) else {})},
    )
