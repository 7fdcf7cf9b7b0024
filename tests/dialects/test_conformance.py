"""What every dialect must keep to. A new dialect that is registered is checked without a new test; the eighth, which
only exists in tests, shows that."""

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gputile.audit import objects, sizes
from gputile.audit.records import readers
from gputile.audit.records.record import Record
from gputile.dialects import gputile, records, registry
from gputile.dialects.device_resources import LARGEST_MESSAGE
from gputile.dialects.dialect import Dialect
from gputile.dialects.kube_objects import GrantContext, NodeInventory, Pod, PodRecord
from gputile.dialects.parsing import convert_pod
from gputile.dialects.settings import DEFAULTS, DialectSettings
from gputile.engine.placement.place import Placement, place
from gputile.model.cards import Card, Node, NodeView
from gputile.model.grants import Grant
from gputile.model.refusals import BadRequest
from gputile.model.requests import PodRequest
from gputile.scheduler.extender.server import INSPECT, OPEN, routes
from gputile.sim.manifests import load_file
from gputile.testing.builders import pod
from tests.dialects import eighth
from tests.dialects.shortcuts import AT, SHELF, bound, object_of, read

ROOT = Path(__file__).parents[2]
VERBS = {"filter", "prioritize", "bind", "preempt", "filter-dryrun", "steer"}
PAGES = OPEN | {INSPECT, "/scheduler/status", "/status"}
SETTINGS = {
    "default": DEFAULTS,
    "small-units": DialectSettings(gpushare_unit="MiB", nano_unit="MiB"),
}
CARDS: dict[str, tuple[Card, ...]] = {
    "no-cards": (),
    "cards-of-all-sizes": SHELF.cards,
    "a-card-of-unknown-size": (Card(index=0, uuid="GPU-0", memory=0),),
    "200,000-slots": (Card(index=0, uuid="GPU-0", memory=2**20, slots=200_000),),
}


@pytest.fixture(params=[*registry.DIALECTS, eighth], ids=lambda dialect: dialect.NAME)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    if request.param is eighth:
        request.getfixturevalue("registered_eighth")
    registered: Dialect = request.param
    return registered


def resources_beside(dialect: Dialect, settings: DialectSettings = DEFAULTS) -> frozenset[str]:
    """The resources that its pods may request: its own, and those of the dialect that it extends."""
    extended = registry.named(dialect.EXTENDS)
    return dialect.resources(settings) | (extended.resources(settings) if extended is not None else frozenset())


def granted(manifest: dict[str, Any], node: Node = SHELF) -> GrantContext:
    request = read(manifest)
    placement = place(request, NodeView.empty(node))
    assert isinstance(placement, Placement)
    grant = placement.grant("uid-1", request)
    return GrantContext(grant=grant, pod=object_of(manifest), asked=request, cards=node.cards, at=AT)


# ---- what it is -----------------------------------------------------------------------------------------------------


def test_its_name_is_its_own_and_it_extends_another_dialect_or_none(dialect: Dialect) -> None:
    assert registry.names().count(dialect.NAME) == 1
    assert dialect.EXTENDS != dialect.NAME
    assert not dialect.EXTENDS or registry.named(dialect.EXTENDS) is not None
    assert dialect.SLOTS_PER_TILE in (0, 1)


def test_its_resources_have_a_domain_and_belong_to_no_other_dialect(dialect: Dialect) -> None:
    own = dialect.resources(DEFAULTS)
    assert own
    assert all(domain and name for domain, _, name in (resource.partition("/") for resource in own))
    others = [each.resources(DEFAULTS) for each in registry.DIALECTS if each is not dialect]
    assert not own & frozenset().union(*others)


def test_it_imports_no_other_dialect(dialect: Dialect) -> None:
    others = {each.__name__ for each in modules() if each is not dialect}
    assert not others & set(imports(inspect.getmodule(dialect.read_pod)))


def modules() -> list[ModuleType]:
    return [module for each in registry.DIALECTS if (module := inspect.getmodule(each.read_pod)) is not None]


def imports(module: ModuleType | None, seen: set[str] | None = None) -> Iterator[str]:
    """The modules of `gputile.dialects` that a module needs, and those that these need."""
    seen = set() if seen is None else seen
    assert module is not None
    for statement in ast.walk(ast.parse(inspect.getsource(module))):
        for name in names_in(statement):
            found = sys.modules.get(name)
            if found is not None and name.startswith("gputile.dialects.") and name not in seen:
                seen.add(name)
                yield name
                yield from imports(found, seen)


def names_in(statement: ast.AST) -> list[str]:
    """The modules that an import statement names, and what may be modules."""
    match statement:
        case ast.Import(names=aliases):
            return [alias.name for alias in aliases]
        case ast.ImportFrom(module=str(module), names=aliases):
            return [module, *(f"{module}.{alias.name}" for alias in aliases)]
    return []


def test_its_extender_paths_are_verbs_and_no_pages(dialect: Dialect) -> None:
    for path in dialect.EXTENDER_PATHS:
        assert path.startswith("/")
        assert path not in PAGES
        assert not path.startswith(INSPECT + "/")
        assert routes()[path] in VERBS


# ---- devices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cards", CARDS.values(), ids=CARDS)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_its_device_resources_are_its_own_and_fit_into_one_message(
    dialect: Dialect, settings: DialectSettings, cards: tuple[Card, ...]
) -> None:
    served = registry.device_resources([dialect.NAME], cards, settings)
    assert {resource.resource for resource in served} <= resources_beside(dialect, settings)
    for resource in served:
        assert resource.dialect == dialect.NAME
        assert len({device for device, _ in resource.devices}) == len(resource.devices)
        assert {uuid for _, uuid in resource.devices} <= {card.uuid for card in cards}
        assert sum(len(device) + 15 for device, _ in resource.devices) < LARGEST_MESSAGE
        assert not (resource.fault and resource.devices)
        assert not resource.fault or "kubelet" in resource.fault


def test_a_card_in_mig_mode_has_no_devices_and_no_sums(dialect: Dialect) -> None:
    cards = [Card(index=0, uuid="GPU-0", memory=4096, mode="mig")]
    assert all(not resource.devices for resource in registry.device_resources([dialect.NAME], cards, DEFAULTS))
    assert set(registry.status_resources([dialect.NAME], cards, DEFAULTS).values()) <= {0}


def test_its_sums_are_resources_of_its_own_without_devices(dialect: Dialect) -> None:
    carriers = {resource.resource for resource in registry.device_resources([dialect.NAME], SHELF.cards, DEFAULTS)}
    sums = registry.status_resources([dialect.NAME], SHELF.cards, DEFAULTS)
    assert sums.keys() <= dialect.resources(DEFAULTS) - carriers
    assert all(amount > 0 for amount in sums.values())


def test_no_resource_is_served_twice(dialect: Dialect) -> None:
    served = registry.device_resources(registry.names(), SHELF.cards, DEFAULTS)
    names = [resource.resource for resource in served]
    assert len(set(names)) == len(names)
    carriers = registry.device_resources([dialect.NAME], SHELF.cards, DEFAULTS)
    assert {resource.resource for resource in carriers} <= set(names)


# ---- a pod's walk ---------------------------------------------------------------------------------------------------


def test_its_examples_are_read_and_request_a_resource_with_devices(dialect: Dialect) -> None:
    carriers = {resource.resource for resource in registry.device_resources([dialect.NAME], SHELF.cards, DEFAULTS)}
    assert dialect.EXAMPLES
    for limits in dialect.EXAMPLES:
        request = read(pod(limits))
        assert (request.dialect, request.slots) == (dialect.NAME, dialect.SLOTS_PER_TILE)
        assert limits.keys() <= resources_beside(dialect)
        assert limits.keys() & carriers


def test_its_examples_count_gpus_as_they_request_them(dialect: Dialect) -> None:
    assert dialect.amounts_of_one_gpu(DEFAULTS).keys() <= resources_beside(dialect)
    for limits in dialect.EXAMPLES:
        (ask,) = read(pod(limits)).asks
        assert records.requested_gpus(object_of(pod(limits)), DEFAULTS) == ask.cards


def test_a_pod_of_two_dialects_is_rejected(dialect: Dialect) -> None:
    for other in registry.DIALECTS:
        if other is not dialect and dialect.NAME != other.EXTENDS and other.NAME != dialect.EXTENDS:
            mixed = registry.read_pod(pod(dialect.EXAMPLES[0], other.EXAMPLES[0]))
            assert isinstance(mixed, BadRequest), other.NAME


@pytest.mark.parametrize("with_others", [False, True], ids=["alone", "beside-other-containers"])
def test_a_written_grant_is_read_back(dialect: Dialect, with_others: bool) -> None:
    for limits in dialect.EXAMPLES:
        manifest = pod(limits, {}, limits, init=({},)) if with_others else pod(limits)
        context = granted(manifest)
        assert records.read_grant(bound(manifest, registry.write_grant(context)), SHELF) == context.grant
        if writes_records(dialect):
            record = dialect.write_grant(context)
            assert records.read_grant(bound(manifest, record), SHELF) == context.grant
            elsewhere = bound(manifest, record, node="n2")
            assert not isinstance(records.read_grant(elsewhere, other_node()), Grant) or not record_names_node(dialect)


def writes_records(dialect: Dialect) -> bool:
    return bool(tuple(dialect.record_keys(DEFAULTS)))


def record_names_node(dialect: Dialect) -> bool:
    return "n1" in dialect.write_grant(granted(pod(dialect.EXAMPLES[0]))).annotations.values()


def other_node() -> Node:
    return Node(name="n2", cards=SHELF.cards, cpu=SHELF.cpu, memory=SHELF.memory)


def test_every_record_has_one_of_its_keys_and_none_of_another_dialect(dialect: Dialect) -> None:
    own = set(dialect.record_keys(DEFAULTS))
    others = {key for each in registry.DIALECTS if each is not dialect for key in each.record_keys(DEFAULTS)}
    for limits in dialect.EXAMPLES:
        record = dialect.write_grant(granted(pod(limits)))
        keys = record.annotations.keys() | record.labels.keys()
        assert bool(keys & own) == bool(own)
        assert keys.isdisjoint(others)
        assert dialect is gputile or not any(key.startswith("gputile.io/") for key in keys)
        assert records.carries_record(bound(pod(limits), record)) == bool(own)
        assert bool(keys) == bool(own)


def test_every_container_sees_the_gpus_it_was_granted(dialect: Dialect) -> None:
    for limits in dialect.EXAMPLES:
        context = granted(pod(limits, {}, limits))
        env = registry.write_grant(context).env
        assert env.keys() == {held.container for held in context.grant.containers}
        for held in context.grant.containers:
            uuids = [tile.uuid for tile in held.tiles]
            assert env[held.container]["NVIDIA_VISIBLE_DEVICES"] == ",".join(uuids)


# ---- the audit ------------------------------------------------------------------------------------------------------


def check_audit(dialect: Dialect) -> None:
    """The audit reads the dialect's record by code of its own, and agrees about slots."""
    reader = next((reader for reader in readers.READERS if reader.FAMILY == dialect.NAME), None)
    assert reader is not None, (
        f"the audit cannot read the record of {dialect.NAME}: add a reader with FAMILY = {dialect.NAME!r} to "
        "gputile/audit/records, and its name to READERS in gputile/audit/records/readers.py"
    )
    gpus = sizes.read_gpus(objects.read_node(manifest_of(SHELF)))
    for limits in dialect.EXAMPLES:
        manifest = pod(limits)
        context = granted(manifest)
        audited = objects.read_pod(json_of(manifest, dialect.write_grant(context)))
        assert reader.has_record(audited)
        record = reader.read(audited, gpus)
        assert isinstance(record, Record)
        assert set(record.gpus) == context.grant.uses().keys()


def manifest_of(node: Node) -> dict[str, Any]:
    inventory = gputile.write_inventory(NodeInventory(node.cards))
    return {"metadata": {"name": node.name, "annotations": {gputile.INVENTORY: inventory}}, "status": {}}


def json_of(manifest: dict[str, Any], record: PodRecord) -> dict[str, Any]:
    """The pod on its node, with its record."""
    metadata = manifest["metadata"] | {"annotations": record.annotations, "labels": record.labels}
    return manifest | {"metadata": metadata, "spec": manifest["spec"] | {"nodeName": SHELF.name}}


def test_the_audit_reads_its_record(dialect: Dialect) -> None:
    if writes_records(dialect) and dialect is not gputile:  # our grant is read by the audit's own path
        check_audit(dialect)


def test_the_audit_agrees_about_its_slots(dialect: Dialect) -> None:
    assert readers.takes_slots(dialect.NAME) == bool(dialect.SLOTS_PER_TILE)


def test_a_dialect_without_a_reader_is_told_what_to_add(
    registered_eighth: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "READERS", tuple(each for each in readers.READERS if each.FAMILY != eighth.NAME))
    with pytest.raises(AssertionError, match="cannot read the record of tenths: add a reader with FAMILY = 'tenths'"):
        check_audit(eighth)


# ---- values that anybody may have written ---------------------------------------------------------------------------

HOSTILE: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(
        [
            *(0, -1, 1, 150, 2**31 - 1, 2**31, 2**63, -(2**70), 10**400, 0.5, -0.0, 1e300, True, False, None, [], {}),
            *("", "0", "-3", " 7 ", "1e9", "1e99", "1.5Gi", "two", "9" * 5000, "٣", "½", "\x00", "x" * 5000, "\ud800"),
            *("0,1", "0,0", ",", ";", ":", "[", "c0[", "c0[0_a_5_5]", "a,b,5,5:;", "null", "[]", "{}", "[null]"),
            *('{"0":{"0":3}}', '{"c0":{"0":[1,2]}}', '{"c0":{"99":[1,2]}}', '{"c0":[0]}', '{"-1":{"0":3}}', "[" * 5000),
        ]
    ),
    st.text(max_size=8),
)
SUPPRESSED = [HealthCheck.function_scoped_fixture]


@settings(max_examples=40, suppress_health_check=SUPPRESSED)
@given(data=st.data())
def test_a_hostile_amount_is_a_request_no_request_or_a_bad_request(dialect: Dialect, data: st.DataObject) -> None:
    names = sorted(resources_beside(dialect))
    limits = data.draw(st.dictionaries(st.sampled_from(names), HOSTILE, min_size=1))
    parsed = registry.read_pod(pod({**dialect.EXAMPLES[0], **limits}))
    assert parsed is None or isinstance(parsed, PodRequest | BadRequest)
    if isinstance(parsed, BadRequest):
        assert 0 < len(parsed.message) < 2000


@settings(max_examples=40, suppress_health_check=SUPPRESSED)
@given(data=st.data())
def test_a_hostile_record_is_a_grant_no_grant_or_a_bad_request(dialect: Dialect, data: st.DataObject) -> None:
    context = granted(pod(dialect.EXAMPLES[0]))
    record = dialect.write_grant(context)
    keys = sorted({*record.annotations, *dialect.record_keys(DEFAULTS)})
    changes = data.draw(st.dictionaries(st.sampled_from(keys), HOSTILE)) if keys else {}
    bound_pod = convert_pod(pod(dialect.EXAMPLES[0], annotations={**record.annotations, **changes}, on="n1"))
    if isinstance(bound_pod, Pod):
        held = records.read_grant(bound_pod, SHELF)
        assert held is None or isinstance(held, Grant | BadRequest)


@settings(max_examples=40, suppress_health_check=SUPPRESSED)
@given(data=st.data())
def test_a_hostile_capacity_is_a_node_or_a_bad_request(dialect: Dialect, data: st.DataObject) -> None:
    names = st.sampled_from(sorted(resources_beside(dialect)))
    capacity, allocatable = (data.draw(st.dictionaries(names, HOSTILE)) for _ in range(2))
    node = registry.read_node(
        {"metadata": {"name": "n1"}, "status": {"capacity": capacity, "allocatable": allocatable}}
    )
    assert isinstance(node, Node | BadRequest)


# ---- its pages and manifests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("installed", registry.DIALECTS, ids=lambda dialect: dialect.NAME)
def test_the_page_of_dialects_names_it_and_what_it_reads(installed: Dialect) -> None:
    page = (ROOT / "docs/dialects.md").read_text()
    assert f"| {installed.NAME}" in page
    for resource in (name for limits in installed.EXAMPLES for name in limits):
        assert f"`{resource}`" in page or f"`{resource.partition('/')[2]}`" in page


@pytest.mark.parametrize("installed", registry.DIALECTS, ids=lambda dialect: dialect.NAME)
def test_its_folder_of_examples_has_pods_of_this_dialect(installed: Dialect) -> None:
    files = sorted((ROOT / "examples" / installed.NAME).glob("*.yaml"))
    read_as = [registry.read_pod(workload.pod) for path in files for workload in load_file(path).workloads]
    assert read_as
    assert all(isinstance(each, PodRequest) and each.dialect == installed.NAME for each in read_as)


def test_the_page_of_the_scheduler_names_every_path() -> None:
    page = (ROOT / "docs/scheduler.md").read_text()
    for path in registry.extender_paths():
        prefix, _, verb = path.rpartition("/")
        rows = [row for row in page.splitlines() if f"`{prefix}/`" in row or (not prefix and f"`{path}`" in row)]
        assert any(f"`{verb}`" in row or f"`/{verb}`" in row for row in rows), path
