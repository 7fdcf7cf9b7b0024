"""GPUs as an agent lists them one by one in an annotation of its node: gputile, HAMi, vgpu-manager, the vcuda fork."""

from collections.abc import Callable, Iterator

from gputile.audit.fields import Json, decoded, digits, items, mapping, names, text, whole
from gputile.audit.objects import AuditedNode, UnreadableObject
from gputile.model.cards import DEFAULT_SLOTS, Card
from gputile.model.units import ALL, MiB

INVENTORY = "gputile.io/inventory"
HAMI = "hami.io/node-nvidia-register"
VGPU_SUFFIX, VGPU_CONFIG = "/node-device-register", "/node-config-info"
FORK = "tydic.io/nvidia-device-register"


def inventory(node: AuditedNode) -> tuple[Card, ...]:
    """`gputile.io/inventory`: an absent field has its default."""
    cordoned = names(node.annotations.get("gputile.io/cordon"))
    return tuple(
        Card(
            index=_number(gpu, "index"),
            uuid=_name(gpu, "uuid"),
            memory=_number(gpu, "memory"),
            cores=_number(gpu, "cores", ALL),
            slots=_number(gpu, "slots", DEFAULT_SLOTS),
            model=text(gpu.get("model")) or "",
            pci=text(gpu.get("pci")) or "",
            mode=text(gpu.get("mode")) or "",
            healthy=gpu.get("healthy", True) is True,
            reason=text(gpu.get("reason")) or "",
            cordoned=gpu.get("uuid") in cordoned,
        )
        for gpu in _listed(mapping(decoded(node.annotations[INVENTORY])).get("cards"), INVENTORY)
    )


def hami(node: AuditedNode) -> tuple[Card, ...]:
    """JSON that omits zeros; older versions write text with colons and commas."""
    register = node.annotations[HAMI].strip()
    cordoned = names(node.annotations.get("hami.io/device-cordon"))
    entries = _hami_json(register) if register.startswith("[") else _hami_text(register)
    return tuple(
        Card(
            index=_number(gpu, "index", 0),
            uuid=_name(gpu, "id"),
            memory=_number(gpu, "devmem", 0),
            cores=_number(gpu, "devcore", 0),
            slots=_number(gpu, "count", 0),
            model=text(gpu.get("type")) or "",
            mode=text(gpu.get("mode")) or "",
            healthy=gpu.get("health") is True,
            cordoned=gpu.get("id") in cordoned,
        )
        for gpu in entries
    )


def _hami_json(register: str) -> Iterator[Json]:
    return _listed(decoded(register), HAMI)


def _hami_text(register: str) -> Iterator[Json]:
    """`uuid,count,MiB,cores,type,numa,health[,index,mode]`, each GPU ended by a colon."""
    for position, entry in enumerate(part for part in register.split(":") if part.strip()):
        fields = [field.strip() for field in entry.split(",")]
        if len(fields) not in (7, 9):
            raise UnreadableObject(f"`{HAMI}` has a GPU of {len(fields)} fields, not 7 or 9")
        numbers = dict(zip(("count", "devmem", "devcore", "numa"), map(digits, (*fields[1:4], fields[5])), strict=True))
        index = digits(fields[7]) if len(fields) == 9 else position
        if index is None or None in numbers.values():
            raise UnreadableObject(f"`{HAMI}` has a field that is not a number")
        mode = fields[8] if len(fields) == 9 else ""
        health = fields[6].lower() == "true"
        yield {"id": fields[0], "type": fields[4], "health": health, "index": index, "mode": mode, **numbers}


def vgpu_domains(node: AuditedNode) -> list[str]:
    """The prefix is an option of vgpu-manager, so any prefix may be in use."""
    return sorted(key.removesuffix(VGPU_SUFFIX) for key in node.annotations if key.endswith(VGPU_SUFFIX))


def vgpu_factor(node: AuditedNode) -> MiB:
    """MiB per `vgpu-memory`, an option of vgpu-manager's agent."""
    configs = (decoded(node.annotations.get(domain + VGPU_CONFIG)) for domain in vgpu_domains(node)[:1])
    return next((factor for config in configs if (factor := whole(mapping(config).get("memoryFactor")))), 1)


def vgpu(node: AuditedNode) -> tuple[Card, ...]:
    domain = vgpu_domains(node)[0]
    split = whole(mapping(decoded(node.annotations.get(domain + VGPU_CONFIG))).get("deviceSplit"))
    return tuple(
        Card(
            index=_number(gpu, "id"),
            uuid=_name(gpu, "uuid"),
            memory=_number(gpu, "memory", 0),
            cores=_number(gpu, "core", ALL),
            slots=_number(gpu, "number", 0) or split or DEFAULT_SLOTS,
            model=text(gpu.get("type")) or "",
            mode="mig" if gpu.get("mig") is True else "",
            healthy=gpu.get("healthy") is True,
        )
        for gpu in _listed(decoded(node.annotations[domain + VGPU_SUFFIX]), domain + VGPU_SUFFIX)
    )


def fork(node: AuditedNode) -> tuple[Card, ...]:
    """The vcuda fork: the position in the list is the index."""
    return tuple(
        Card(
            index=index,
            uuid=_name(gpu, "id"),
            memory=_number(gpu, "memory"),
            cores=_number(gpu, "core", ALL),
            model=text(gpu.get("type")) or "",
            mode="mig" if gpu.get("isMig") is True else "",
            healthy=gpu.get("health") is True,
        )
        for index, gpu in enumerate(_listed(decoded(node.annotations[FORK]), FORK))
    )


def listed_by(node: AuditedNode) -> tuple[str, Callable[[AuditedNode], tuple[Card, ...]]] | None:
    """Which agent lists the node's GPUs, and the parser of its list; None when no agent does."""
    if INVENTORY in node.annotations:
        return "gputile", inventory
    if node.annotations.get(HAMI, "").strip():
        return "hami", hami
    if vgpu_domains(node):
        return "vgpu", vgpu
    return ("vcuda", fork) if FORK in node.annotations else None


# ---- entries of a list ----------------------------------------------------------------------------------------------


def _listed(value: object, key: str) -> Iterator[Json]:
    if not isinstance(value, list | tuple) or not all(isinstance(entry, dict) for entry in value):
        raise UnreadableObject(f"`{key}` cannot be read: it is not a list of objects")
    yield from items(value)


def _number(gpu: Json, key: str, default: int | None = None) -> int:
    number = default if gpu.get(key) is None else whole(gpu[key])
    if number is None:
        raise UnreadableObject(f"`{key}` of a GPU is not a number")
    return number


def _name(gpu: Json, key: str) -> str:
    name = gpu.get(key)
    if not isinstance(name, str) or not name:
        raise UnreadableObject(f"`{key}` of a GPU is empty or not a string")
    return name
