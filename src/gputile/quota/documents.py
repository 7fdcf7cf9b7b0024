"""Parsers of quota documents: our `quota.yaml`, and the ConfigMap of gpu-admission.

YAML or JSON trees become `Quotas`, all or nothing: a document with one error is rejected as a whole. The `InputError`
says where the error is and what to write.
"""

import re
from collections import Counter
from fractions import Fraction
from typing import Any

import msgspec

from gputile.model.decode_errors import decode_problem
from gputile.model.errors import InputError
from gputile.model.units import ALL, MiB, Percent, quantity
from gputile.quota.limits import ANY_MODEL, Limit, Quota, Quotas

OUR_KEY, OLD_KEY = "quota.yaml", "gpu_quota"
MOST = 10**9  # of any amount: more is an error

Written = str | int | float | None
"""A number, as YAML or JSON may carry it."""


class LimitText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One limit, as it is written in `quota.yaml`."""

    model: str = ANY_MODEL
    cards: Written = None
    memory: Written = None
    cores: Written = None


class NamespaceText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The quota of one namespace, as it is written in `quota.yaml`."""

    limits: tuple[LimitText, ...] | None = None  # absent: any model, unlimited
    pools: tuple[str, ...] = ()


class DocumentText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole of `quota.yaml`."""

    namespaces: dict[str, Any]


def read_ours(tree: Any, source: str) -> Quotas:
    """Parse our document: `namespaces`, each with `limits` and `pools`; see docs/quota.md."""
    if tree is None:
        raise InputError(f"{source}: `{OUR_KEY}` is empty; write `namespaces: {{}}` for no quotas")
    document = _converted(tree, DocumentText, f"{source}: `{OUR_KEY}`")
    return {
        name: _quota(_converted(value, NamespaceText, f"{source}: namespace `{name}`"), name, source)
        for name, value in document.namespaces.items()
    }


def _quota(text: NamespaceText, name: str, source: str) -> Quota:
    where = f"{source}: namespace `{name}`"
    if not all(text.pools):
        raise InputError(f"{where}: a pool has no name; write the value of a node's pool label")
    limits = (LimitText(),) if text.limits is None else text.limits
    twins = sorted(model for model, count in Counter(limit.model for limit in limits).items() if count > 1)
    if twins:
        raise InputError(f"{where}: model `{twins[0]}` has two limits; write one with all that it limits")
    return Quota(tuple(_limit(limit, where) for limit in limits), text.pools, source)


def _limit(text: LimitText, where: str) -> Limit:
    if not text.model:
        raise InputError(f"{where}: a limit has an empty `model`; write a name such as A100, or leave it out for any")
    where = f"{where}: model `{text.model}`"
    return Limit(
        model=text.model,
        cards=_cards(text.cards, where),
        memory=_memory(text.memory, where),
        cores=_whole(text.cores, f"{where}: `cores` is {text.cores!r}; write percent of one GPU, such as 250", 1),
    )


def _cards(written: Written, where: str) -> Percent | None:
    """In hundredths of a card."""
    return _whole(written, f"{where}: `cards` is {written!r}; write a number such as 4 or 2.5", ALL)


def _memory(written: Written, where: str) -> MiB | None:
    """The unit is required: a plain number could be bytes, as in Kubernetes, or MiB, as in pods."""
    message = f"{where}: `memory` is {written!r}; write it with a unit, such as 160Gi"
    if written is not None and not str(written).strip()[-1:].isalpha():
        raise InputError(message)
    return _whole(written, message, Fraction(1, 1024**2))


def _whole(written: Written, message: str, unit: Fraction | int) -> int | None:
    if written is None:
        return None
    number = quantity(written)
    if number is None or number * unit % 1 or not 0 <= number * unit <= MOST:
        raise InputError(message)
    return int(number * unit)


def _converted(tree: Any, kind: type[msgspec.Struct], where: str) -> Any:
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        raise InputError(f"{where}: {decode_problem(error)}; see docs/quota.md") from error


# ---- gpu-admission -------------------------------------------------------------------------------------------------


class OldText(msgspec.Struct, frozen=True):
    """The quota of one namespace in gpu-admission's JSON. As in Go, keys ignore case and unknown keys are skipped."""

    quota: dict[str, int | float] | None = None
    pool: tuple[str, ...] | None = None


def read_old(text: str, source: str) -> Quotas:
    """Parse gpu-admission's document: whole cards by model, and pools. A quota without models allows nothing."""
    try:
        tree = msgspec.json.decode(text, type=dict[str, dict[str, Any]])
    except msgspec.ValidationError as error:
        raise InputError(f"{source}: `{OLD_KEY}`: {decode_problem(error)}; see docs/quota.md") from error
    except (msgspec.DecodeError, RecursionError) as error:
        position = re.search(r"byte \d+", str(error))
        place = f" ({position[0]})" if position else ""
        raise InputError(f"{source}: `{OLD_KEY}` is not valid JSON{place}; see docs/quota.md") from error
    return {name: _old_quota(fields, name, source) for name, fields in tree.items()}


def _old_quota(fields: dict[str, Any], name: str, source: str) -> Quota:
    where = f"{source}: namespace `{name}`"
    text: OldText = _converted({key.lower(): value for key, value in fields.items()}, OldText, where)
    limits = [
        Limit(model=model, cards=_cards(cards, f"{where}: model `{model}`"))
        for model, cards in (text.quota or {}).items()
    ]
    return Quota(tuple(limits), text.pool or (), source)


def merged(ours: Quotas, old: Quotas) -> Quotas:
    """For each namespace our quota overrides the old one; our `*` is for namespaces that neither names."""
    return {**old, **ours}
