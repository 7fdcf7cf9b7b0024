"""What there is, for those who look before they ask: discovery in its three shapes, and OpenAPI for `kubectl explain`.

Room:  constant documents, made once from the table of resources.
Door:  `document(path, accept)`; None where there is none.
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
    if path == "/apis" and AGGREGATED in accept:
        version = "v2" if "v=v2;" in accept or accept.endswith("v=v2") else "v2beta1"
        kind = f"application/json;g=apidiscovery.k8s.io;v={version};{AGGREGATED}"
        return Response(orjson.dumps(_aggregated(version)), content_type=kind)
    found = _documents().get(path)
    return Response(found) if found is not None else None


@cache
def _documents() -> dict[str, bytes]:
    found: dict[str, Json] = {
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(group) for group in GROUPS]},
        "/openapi/v2": _swagger(),
        "/version": {"gitVersion": f"v{__version__}", "major": "1", "minor": "0"},
    }
    paths = {}
    for group, version in GROUPS.items():
        found[f"/apis/{group}"] = {"kind": "APIGroup", "apiVersion": "v1", **_group(group)}
        found[f"/apis/{group}/{version}"] = _resource_list(group)
        described = _open_api(group)
        found[f"/openapi/v3/apis/{group}/{version}"] = described
        mark = hashlib.sha256(orjson.dumps(described)).hexdigest().upper()
        url = f"/openapi/v3/apis/{group}/{version}?hash={mark}"
        paths[f"apis/{group}/{version}"] = {"serverRelativeURL": url}
    found["/openapi/v3"] = {"paths": paths}
    return {path: orjson.dumps(body) for path, body in found.items()}


def _of(group: str) -> list[Resource]:
    return [one for one in RESOURCES if one.group == group]


def _group(group: str) -> Json:
    version = {"groupVersion": f"{group}/{GROUPS[group]}", "version": GROUPS[group]}
    return {"name": group, "versions": [version], "preferredVersion": version}


def _resource_list(group: str) -> Json:
    listed = [
        {
            "name": one.plural,
            "singularName": one.singular,
            "namespaced": one.namespaced,
            "kind": one.kind,
            "verbs": list(VERBS),
            **({"shortNames": list(one.short)} if one.short else {}),
        }
        for one in _of(group)
    ]
    about = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": f"{group}/{GROUPS[group]}"}
    return {**about, "resources": listed}


def _aggregated(version: str) -> Json:
    items = [
        {
            "metadata": {"name": group, "creationTimestamp": None},
            "versions": [
                {
                    "version": GROUPS[group],
                    "freshness": "Current",
                    "resources": [_discovered(one) for one in _of(group)],
                }
            ],
        }
        for group in GROUPS
    ]
    about = {"kind": "APIGroupDiscoveryList", "apiVersion": f"apidiscovery.k8s.io/{version}", "metadata": {}}
    return {**about, "items": items}


def _discovered(one: Resource) -> Json:
    return {
        "resource": one.plural,
        "responseKind": {"group": one.group, "version": one.version, "kind": one.kind},
        "scope": "Namespaced" if one.namespaced else "Cluster",
        "singularResource": one.singular,
        "verbs": list(VERBS),
        **({"shortNames": list(one.short)} if one.short else {}),
    }


# ---- OpenAPI --------------------------------------------------------------------------------------------------------

TEXT, WHOLE = {"type": "string"}, {"type": "integer", "format": "int64"}
META = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"


def _object(meaning: str, **properties: Json) -> Json:
    return {"type": "object", "description": meaning, "properties": properties}


def _list(meaning: str, item: Json) -> Json:
    return {"type": "array", "description": meaning, "items": item}


DEVICE = _object(
    "A card, or a tile of it.",
    device_id={**TEXT, "description": "The UUID."},
    device_brand={**TEXT, "description": "NVML's brand, told from the model's name."},
    device_model={**TEXT, "description": "The model, as the driver names it."},
    device_busid={**TEXT, "description": "The PCI address."},
    device_node={**TEXT, "description": "The node that it is in."},
    index={**WHOLE, "description": "The index on its node."},
    memory={**WHOLE, "description": "MiB that the container holds."},
    cores={**WHOLE, "description": "Percent of the card's cores that it holds; 0 reserves none."},
    use=_object(
        "What its processes use, where the agent tells; what is not known is absent.",
        memory={**WHOLE, "description": "MiB."},
        cores={**WHOLE, "description": "Percent of the card's cores."},
    ),
)
AMOUNT = _object("How much there is, and how much is held.", total=WHOLE, held=WHOLE)
NODE_SPEC = _object(
    "The node's cards.",
    device_node=TEXT,
    device_infos={"type": "object", "description": "The cards by UUID.", "additionalProperties": DEVICE},
    device_models={
        "type": "object",
        "description": "UUIDs by model, in lower case.",
        "additionalProperties": {"type": "array", "items": TEXT},
    },
    device_busy=_list("UUIDs of cards of which somebody holds a part.", TEXT),
    report_time={**TEXT, "description": "When anything of this last changed."},
)
NODE_STATUS = _object(
    "How they are.",
    node_health={**TEXT, "description": "True, False, or UnKnow where no agent of ours is."},
    node_last_health_time={**TEXT, "description": "When the agent last renewed its Lease."},
    node_last_transition_time={**TEXT, "description": "When node_health last changed."},
    agent={**TEXT, "description": "Whose agent describes the node."},
    fault={**TEXT, "description": "Why the whole node is out of use."},
    pool=TEXT,
    cards=_list(
        "The cards and what is held of them.",
        _object(
            "A card.",
            index=WHOLE,
            uuid=TEXT,
            model=TEXT,
            memory=AMOUNT,
            cores=AMOUNT,
            tenants={**WHOLE, "description": "Pods that hold a tile."},
            healthy={"type": "boolean"},
            reason=TEXT,
            cordoned={"type": "boolean"},
        ),
    ),
)
POD_SPEC = _object(
    "What the pod holds.",
    pod_name=TEXT,
    pod_namespace=TEXT,
    node_name=TEXT,
    dialect={**TEXT, "description": "In which family's words the pod asked."},
    containers_device=_list(
        "Its containers with cards.",
        _object("A container.", container_name=TEXT, role=TEXT, device_info=_list("Its tiles.", DEVICE)),
    ),
)
POD_STATUS = _object(
    "How it is.",
    phase={**TEXT, "description": "The pod's phase."},
    ending={"type": "boolean", "description": "Its deletion was asked for."},
    last_changed_time={**TEXT, "description": "When anything of this last changed."},
)
ABOUT = {
    "nodes": ("The GPUs of a node.", NODE_SPEC, NODE_STATUS),
    "pods": ("A pod and the GPUs that it holds.", POD_SPEC, POD_STATUS),
}


def _schemas(group: str, reference: str) -> Json:
    found: Json = {}
    for one in _of(group):
        meaning, spec, status = ABOUT[one.of]
        name = f"{'.'.join(reversed(one.group.split('.')))}.{one.version}.{one.kind}"
        about = {"x-kubernetes-group-version-kind": [{"group": one.group, "version": one.version, "kind": one.kind}]}
        metadata = (
            {"allOf": [{"$ref": f"{reference}{META}"}]} if "components" in reference else {"$ref": reference + META}
        )
        parts = {"apiVersion": TEXT, "kind": TEXT, "metadata": metadata, "spec": spec, "status": status}
        found[name] = {**_object(meaning, **parts), **about}
    found[META] = _object("Metadata of an object.", name=TEXT, namespace=TEXT, uid=TEXT, resourceVersion=TEXT)
    return found


def _paths(group: str, *, version: int) -> Json:
    """`kubectl explain` finds a kind by its path."""
    found: Json = {}
    for one in _of(group):
        kind = {"group": one.group, "version": one.version, "kind": one.kind}
        root = f"/apis/{one.api_version}"
        inside = f"{root}/namespaces/{{namespace}}" if one.namespaced else root
        content: Json = {"description": "OK"}
        for path, action in ((f"{inside}/{one.plural}", "list"), (f"{inside}/{one.plural}/{{name}}", "get")):
            get = {
                "operationId": f"{action}{one.kind}",
                "responses": {"200": content},
                "x-kubernetes-action": action,
                "x-kubernetes-group-version-kind": kind,
            }
            names = [name for name in ("namespace", "name") if f"{{{name}}}" in path]
            said = {"schema": TEXT} if version == 3 else {"type": "string"}
            parameters = [{"name": name, "in": "path", "required": True, **said} for name in names]
            found[path] = {"get": get, **({"parameters": parameters} if parameters else {})}
    return found


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
