"""Which models a name means, which containers run at the same time, what an ask is of a card."""

import pytest

from gputile.model.requests import Constraints, ContainerRequest, Match, ModelRule, Role, phases
from gputile.testing.builders import ask

APP, SIDECAR, INIT = Role.APP, Role.SIDECAR, Role.INIT


@pytest.mark.parametrize(
    ("name", "model", "by_name", "by_substring"),
    [
        pytest.param("NVIDIA A10", "NVIDIA A10", True, True, id="the-whole-name"),
        pytest.param("nvidia a10", "NVIDIA A10", True, True, id="case-never-counts"),
        pytest.param("A10", "NVIDIA A10", True, True, id="a-part"),
        pytest.param("A10", "NVIDIA A100-SXM4-80GB", False, True, id="A10-is-A100-only-as-a-substring"),
        pytest.param("A100", "NVIDIA A100-SXM4-80GB", True, True, id="A100-is-A100"),
        pytest.param("100", "Tesla V100", True, True, id="a-number-after-a-letter-is-whole"),
        pytest.param("00", "Tesla V100", False, True, id="the-end-of-a-number-is-no-name"),
        pytest.param("V100", "Tesla V100S", True, True, id="a-letter-may-follow"),
        pytest.param("80", "A800 80GB", True, True, id="a-later-place-may-match-where-the-first-does-not"),
        pytest.param("T4", "NVIDIA A30", False, False, id="another-model"),
        pytest.param("A30", "", False, False, id="a-card-of-unknown-model"),
    ],
)
def test_model_rule(name: str, model: str, by_name: bool, by_substring: bool) -> None:
    assert ModelRule((name,), Match.NAME).accepts(model) is by_name
    assert ModelRule((name,), Match.SUBSTRING).accepts(model) is by_substring


def test_one_name_of_a_list_is_enough() -> None:
    assert ModelRule(("T4", "A30")).accepts("NVIDIA A30")


@pytest.mark.parametrize(
    ("rule", "accepted"),
    [
        pytest.param(Constraints(), {"A10", "A100", "T4"}, id="no-rule-accepts-all"),
        pytest.param(Constraints(models=(ModelRule(("A10", "T4")),)), {"A10", "T4"}, id="one-list"),
        pytest.param(
            Constraints(models=(ModelRule(("A10", "T4")), ModelRule(("A10", "A100")))),
            {"A10"},
            id="every-list-must-accept",
        ),
        pytest.param(
            Constraints(not_models=(ModelRule(("A10",)), ModelRule(("T4",)))), {"A100"}, id="no-exclusion-may-accept"
        ),
        pytest.param(
            Constraints(models=(ModelRule(("A",), Match.SUBSTRING),), not_models=(ModelRule(("A100",)),)),
            {"A10"},
            id="both-together",
        ),
    ],
)
def test_accepted_models(rule: Constraints, accepted: set[str]) -> None:
    assert {model for model in ("A10", "A100", "T4") if rule.accepts_model(model)} == accepted


@pytest.mark.parametrize(
    ("rule", "accepted"),
    [
        pytest.param(Constraints(), {"a", "b"}, id="any-card"),
        pytest.param(Constraints(uuids=frozenset({"a"})), {"a"}, id="only-this-card"),
        pytest.param(Constraints(not_uuids=frozenset({"a"})), {"b"}, id="any-but-this-card"),
        pytest.param(Constraints(uuids=frozenset("a"), not_uuids=frozenset("a")), set(), id="excluded-wins"),
    ],
)
def test_accepted_uuids(rule: Constraints, accepted: set[str]) -> None:
    assert {uuid for uuid in ("a", "b") if rule.accepts_uuid(uuid)} == accepted


@pytest.mark.parametrize(
    ("modes", "accepted"),
    [
        pytest.param(set[str](), {"", "mps", "hami-core"}, id="any-mode"),
        pytest.param({"mps"}, {"", "mps"}, id="a-card-that-names-no-mode-passes"),
    ],
)
def test_accepted_modes(modes: set[str], accepted: set[str]) -> None:
    rule = Constraints(modes=frozenset(modes))
    assert {mode for mode in ("", "mps", "hami-core") if rule.accepts_mode(mode)} == accepted


@pytest.mark.parametrize(
    ("roles", "alive"),
    [
        pytest.param([], [], id="no-containers"),
        pytest.param([APP, APP], [(0,), (0,)], id="app-containers-live-the-main-life"),
        pytest.param([INIT, INIT, APP], [(1,), (2,), (0,)], id="each-init-container-runs-alone"),
        pytest.param([SIDECAR, INIT, APP], [(0, 1), (1,), (0,)], id="a-sidecar-runs-beside-later-init-containers"),
        pytest.param([INIT, SIDECAR, APP], [(1,), (0,), (0,)], id="and-not-beside-earlier-ones"),
        pytest.param(
            [INIT, SIDECAR, INIT, SIDECAR, INIT, APP],
            [(1,), (0, 2, 3), (2,), (0, 3), (3,), (0,)],
            id="each-sidecar-from-its-start-on",
        ),
    ],
)
def test_phases(roles: list[Role], alive: list[tuple[int, ...]]) -> None:
    assert phases(roles) == alive


@pytest.mark.parametrize(
    ("wanted", "memory"),
    [
        pytest.param(ask(3000), 3000, id="MiB-are-MiB-on-any-card"),
        pytest.param(ask(0), 0, id="no-memory-is-none"),
        pytest.param(ask(percent=50), 7554, id="a-percentage-is-rounded-down"),
        pytest.param(ask(percent=100), 15109, id="100-percent-is-all"),
        pytest.param(ask(whole=True), 15109, id="a-whole-card-is-all"),
    ],
)
def test_memory_of_a_card_of_15109_mib(wanted: ContainerRequest, memory: int) -> None:
    assert wanted.memory_of(15109) == memory


def test_whole_cards_are_all_memory_all_cores_and_exclusive() -> None:
    want = ContainerRequest(container="c", role=INIT, cards=2, memory_percent=100, cores=100, exclusive=True)
    assert ContainerRequest.whole("c", INIT, 2) == want
