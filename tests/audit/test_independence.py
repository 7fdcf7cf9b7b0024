"""The audit shares no code with what it audits: not by its imports, and not when the shared code is broken."""

import subprocess
import sys
from pathlib import Path

import pytest

from gputile.dialects import gpushare, gputile, hami, kube_objects, nano, parsing, records, registry, vcuda, vgpu
from gputile.model import grants
from tests.audit.nodes import (
    Json,
    elastic,
    held,
    look,
    ours,
    pod,
)
from tests.audit.nodes import (
    gpushare as gpushare_node,
)
from tests.audit.nodes import (
    hami as hami_node,
)
from tests.audit.nodes import (
    vcuda as vcuda_node,
)
from tests.audit.nodes import vgpu as vgpu_node
from tests.audit.test_records import (
    INDEX,
    MEM,
    ONE,
    OUR_TILE,
    TILE,
    V_CORE,
    VGPU_TILE,
    assumed,
    grant,
    hami_record,
    predicate,
    vgpu_record,
)

PAIRS: list[tuple[Json, Json]] = [
    (ours("g0"), pod(OUR_TILE, notes=grant(("g0", 6000, 0)))),
    (hami_node("g0"), pod(TILE, notes=hami_record(ONE))),
    (vgpu_node("v0"), pod(VGPU_TILE, notes=vgpu_record("c0[0_v0_60_9000]"))),
    (gpushare_node(15), pod({MEM: 5}, notes={INDEX: "0"})),
    (elastic(), pod({"elasticgpu.io/gpu-core": 50}, notes=assumed(c0="0"))),
    (vcuda_node(), pod({V_CORE: 50}, notes=predicate("0"))),
]


def test_it_imports_values_and_units_of_ours_and_nothing_else() -> None:
    """In a process of its own, where nothing else has imported anything."""
    program = "import sys, gputile.audit.audit; print(*sorted(m for m in sys.modules if m.startswith('gputile')))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    others = {name for name in loaded if not name.startswith("gputile.audit")}
    assert others == {
        "gputile",
        "gputile.model",
        "gputile.model.cards",
        "gputile.model.requests",
        "gputile.model.units",
    }


def test_the_import_contract_names_what_it_may_not_share() -> None:
    contract = (Path(__file__).parents[2] / ".importlinter").read_text().split("[importlinter:contract:audit")[1]
    mine = contract.split("[importlinter")[0].split()
    shared = {
        f"gputile.{package}" for package in ("dialects", "ledger", "quota", "engine", "scheduler", "model.grants")
    }
    assert shared <= set(mine)


@pytest.mark.parametrize(
    ("node_manifest", "manifest"), PAIRS, ids=["gputile", "hami", "vgpu", "gpushare", "nano", "vcuda"]
)
def test_it_answers_the_same_when_the_dialects_are_broken(
    node_manifest: Json, manifest: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = look(node_manifest, manifest)
    assert held(before)
    for module in (records, registry, gputile, hami, vgpu, gpushare, nano, vcuda, kube_objects, parsing, grants):
        for name, value in list(vars(module).items()):
            if callable(value) and getattr(value, "__module__", "") == module.__name__:
                monkeypatch.setattr(module, name, _broken)
    assert look(node_manifest, manifest) == before
    with pytest.raises(ZeroDivisionError):
        records.read_grant(manifest, None)  # type: ignore[arg-type]


def _broken(*_: object, **__: object) -> None:
    raise ZeroDivisionError
