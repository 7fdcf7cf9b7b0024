"""Discovery documents in their three formats, and OpenAPI for `kubectl explain`.

They are constant, built once from the table of resources.
"""

import hashlib
from functools import cache
from typing import Any

import orjson

from gputile import __version__
from gputile.http.messages import Response
from gputile.metrics_api.resources import GROUPS, RESOURCES, VERBS, Resource

Json = dict[str, Any]
AGGREGATED = "as=APIGroupDiscoveryList"


def document(path: str, accept: str) -> Response | None:
    """The document of this path; None if there is none."""
    if path == "/apis" and AGGREGATED in accept:
        version = "v2" if "v=v2;" in accept or accept.endswith("v=v2") else "v2beta1"
        kind = f"application/json;g=apidiscovery.k8s.io;v={version};{AGGREGATED}"
        return Response(orjson.dumps(_aggregated(version)), content_type=kind)
    body = _documents().get(path)
    return Response(body) if body is not None else None


@cache
def _documents() -> dict[str, bytes]:
    documents: dict[str, Json] = {
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(group) for group in GROUPS]},
        "/openapi/v2": _swagger(),
        "/version": {"gitVersion": f"v{__version__}", "major": "1", "minor": "0"},
    }
    paths = {}
    for group, version in GROUPS.items():
        documents[f"/apis/{group}"] = {"kind": "APIGroup", "apiVersion": "v1", **_group(group)}
        documents[f"/apis/{group}/{version}"] = _resource_list(group)
        open_api = _open_api(group)
        documents[f"/openapi/v3/apis/{group}/{version}"] = open_api
        digest = hashlib.sha256(orjson.dumps(open_api)).hexdigest().upper()
        url = f"/openapi/v3/apis/{group}/{version}?hash={digest}"
        paths[f"apis/{group}/{version}"] = {"serverRelativeURL": url}
    documents["/openapi/v3"] = {"paths": paths}
    return {path: orjson.dumps(body) for path, body in documents.items()}


def _resources_of(group: str) -> list[Resource]:
    return [resource for resource in RESOURCES if resource.group == group]


def _group(group: str) -> Json:
    version = {"groupVersion": f"{group}/{GROUPS[group]}", "version": GROUPS[group]}
    return {"name": group, "versions": [version], "preferredVersion": version}


def _resource_list(group: str) -> Json:
    resources = [
        {
            "name": resource.plural,
            "singularName": resource.singular,
            "namespaced": resource.namespaced,
            "kind": resource.kind,
            "verbs": list(VERBS),
            **({"shortNames": list(resource.short)} if resource.short else {}),
        }
        for resource in _resources_of(group)
    ]
    head = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": f"{group}/{GROUPS[group]}"}
    return {**head, "resources": resources}


def _aggregated(version: str) -> Json:
    items = [
        {
            "metadata": {"name": group, "creationTimestamp": None},
            "versions": [
                {
                    "version": GROUPS[group],
                    "freshness": "Current",
                    "resources": [_discovery_of(resource) for resource in _resources_of(group)],
                }
            ],
        }
        for group in GROUPS
    ]
    head = {"kind": "APIGroupDiscoveryList", "apiVersion": f"apidiscovery.k8s.io/{version}", "metadata": {}}
    return {**head, "items": items}


def _discovery_of(resource: Resource) -> Json:
    return {
        "resource": resource.plural,
        "responseKind": {"group": resource.group, "version": resource.version, "kind": resource.kind},
        "scope": "Namespaced" if resource.namespaced else "Cluster",
        "singularResource": resource.singular,
        "verbs": list(VERBS),
        **({"shortNames": list(resource.short)} if resource.short else {}),
    }


# ---- OpenAPI --------------------------------------------------------------------------------------------------------

TEXT, WHOLE = {"type": "string"}, {"type": "integer", "format": "int64"}
META = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"


def _object(description: str, **properties: Json) -> Json:
    return {"type": "object", "description": description, "properties": properties}


def _list(description: str, item: Json) -> Json:
    return {"type": "array", "description": description, "items": item}


DEVICE = _object(
    "A GPU, or a share of it.",
    device_id={**TEXT, "description": "The UUID."},
    device_brand={**TEXT, "description": "NVML's brand, derived from the model's name."},
    device_model={**TEXT, "description": "The model, as named by the driver."},
    device_busid={**TEXT, "description": "The PCI address."},
    device_node={**TEXT, "description": "The node of the GPU."},
    index={**WHOLE, "description": "The index on its node."},
    memory={**WHOLE, "description": "MiB allocated to the container."},
    cores={**WHOLE, "description": "Percent of the GPU's cores allocated to the container; 0: none are reserved."},
    use=_object(
        "Usage by its processes, where the agent reports it; unknown values are absent.",
        memory={**WHOLE, "description": "MiB."},
        cores={**WHOLE, "description": "Percent of the GPU's cores."},
    ),
)
AMOUNT = _object("The total, and how much of it is allocated.", total=WHOLE, held=WHOLE)
NODE_SPEC = _object(
    "The node's GPUs.",
    device_node=TEXT,
    device_infos={"type": "object", "description": "The GPUs by UUID.", "additionalProperties": DEVICE},
    device_models={
        "type": "object",
        "description": "UUIDs by model, in lower case.",
        "additionalProperties": {"type": "array", "items": TEXT},
    },
    device_busy=_list("UUIDs of GPUs with allocations.", TEXT),
    report_time={**TEXT, "description": "When this object last changed."},
)
NODE_STATUS = _object(
    "The state of the node's GPUs.",
    node_health={**TEXT, "description": "True, False, or UnKnow without a gputile agent."},
    node_last_health_time={**TEXT, "description": "When the agent last renewed its Lease."},
    node_last_transition_time={**TEXT, "description": "When node_health last changed."},
    agent={**TEXT, "description": "The agent that reports the node's GPUs."},
    fault={**TEXT, "description": "Why the whole node is out of use."},
    pool=TEXT,
    cards=_list(
        "The GPUs and their allocations.",
        _object(
            "A GPU.",
            index=WHOLE,
            uuid=TEXT,
            model=TEXT,
            memory=AMOUNT,
            cores=AMOUNT,
            tenants={**WHOLE, "description": "Pods with an allocation on the GPU."},
            healthy={"type": "boolean"},
            reason=TEXT,
            cordoned={"type": "boolean"},
        ),
    ),
)
POD_SPEC = _object(
    "The GPUs of the pod.",
    pod_name=TEXT,
    pod_namespace=TEXT,
    node_name=TEXT,
    dialect={**TEXT, "description": "The dialect of the pod's GPU request."},
    containers_device=_list(
        "The containers with GPUs.",
        _object("A container.", container_name=TEXT, role=TEXT, device_info=_list("Its GPU shares.", DEVICE)),
    ),
)
POD_STATUS = _object(
    "The state of the pod.",
    phase={**TEXT, "description": "The pod's phase."},
    ending={"type": "boolean", "description": "Whether the pod is terminating."},
    last_changed_time={**TEXT, "description": "When this object last changed."},
)
SCHEMAS = {
    "nodes": ("The GPUs of a node.", NODE_SPEC, NODE_STATUS),
    "pods": ("A pod and its GPUs.", POD_SPEC, POD_STATUS),
}


def _schemas(group: str, reference: str) -> Json:
    schemas: Json = {}
    for resource in _resources_of(group):
        description, spec, status = SCHEMAS[resource.of]
        name = f"{'.'.join(reversed(resource.group.split('.')))}.{resource.version}.{resource.kind}"
        kind = {"group": resource.group, "version": resource.version, "kind": resource.kind}
        metadata = (
            {"allOf": [{"$ref": f"{reference}{META}"}]} if "components" in reference else {"$ref": reference + META}
        )
        parts = {"apiVersion": TEXT, "kind": TEXT, "metadata": metadata, "spec": spec, "status": status}
        schemas[name] = {**_object(description, **parts), "x-kubernetes-group-version-kind": [kind]}
    schemas[META] = _object("Metadata of an object.", name=TEXT, namespace=TEXT, uid=TEXT, resourceVersion=TEXT)
    return schemas


def _paths(group: str, *, version: int) -> Json:
    """`kubectl explain` finds a kind by its path."""
    paths: Json = {}
    for resource in _resources_of(group):
        kind = {"group": resource.group, "version": resource.version, "kind": resource.kind}
        root = f"/apis/{resource.api_version}"
        scope = f"{root}/namespaces/{{namespace}}" if resource.namespaced else root
        content: Json = {"description": "OK"}
        for path, action in ((f"{scope}/{resource.plural}", "list"), (f"{scope}/{resource.plural}/{{name}}", "get")):
            get = {
                "operationId": f"{action}{resource.kind}",
                "responses": {"200": content},
                "x-kubernetes-action": action,
                "x-kubernetes-group-version-kind": kind,
            }
            names = [name for name in ("namespace", "name") if f"{{{name}}}" in path]
            type_of = {"schema": TEXT} if version == 3 else {"type": "string"}
            parameters = [{"name": name, "in": "path", "required": True, **type_of} for name in names]
            paths[path] = {"get": get, **({"parameters": parameters} if parameters else {})}
    return paths


def _open_api(group: str) -> Json:
    schemas = _schemas(group, "#/components/schemas/")
    info = {"title": "gputile", "version": __version__}
    return {"openapi": "3.0.0", "info": info, "paths": _paths(group, version=3), "components": {"schemas": schemas}}


def _swagger() -> Json:
    definitions: Json = {}
    paths: Json = {}
    for group in GROUPS:
        definitions |= _schemas(group, "#/definitions/")
        paths |= _paths(group, version=2)
    info = {"title": "gputile", "version": __version__}
    return {"swagger": "2.0", "info": info, "paths": paths, "definitions": definitions}
