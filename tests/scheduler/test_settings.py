"""Settings: their sources, the precedence of sources, and an error message for everything that is load with them."""

import itertools
import re
from typing import Any

import msgspec
import pytest

from gputile.cli.commands.scheduler import SETTINGS
from gputile.cli.settings_loader import explained
from gputile.model.errors import InputError
from gputile.scheduler.settings import Settings

ALL = SETTINGS.names()


def settings(document: Any = None, env: dict[str, str] | None = None, **flags: str) -> Settings:
    return SETTINGS.compose(
        document, env or {}, {name.replace("__", "."): value for name, value in flags.items()}, "s.yaml"
    )


def test_without_any_source_the_defaults_apply() -> None:
    assert settings() == settings({}) == Settings()


@pytest.mark.parametrize(
    ("document", "env", "flags", "keep"),
    [
        pytest.param({"filter": {"keep": 2}}, {}, {}, 2, id="the-file"),
        pytest.param({}, {"GPUTILE_FILTER_KEEP": "3"}, {}, 3, id="the-environment"),
        pytest.param({}, {}, {"filter__keep": "4"}, 4, id="a-flag"),
        pytest.param({"filter": {"keep": 2}}, {"GPUTILE_FILTER_KEEP": "3"}, {}, 3, id="the-environment-beats-the-file"),
        pytest.param({"filter": {"keep": 2}}, {"GPUTILE_FILTER_KEEP": "3"}, {"filter__keep": "4"}, 4, id="flags-win"),
        pytest.param({"filter": None}, {"GPUTILE_FILTER_KEEP": "3"}, {}, 3, id="an-empty-section-is-filled"),
    ],
)
def test_the_later_wins(document: Any, env: dict[str, str], flags: dict[str, str], keep: int) -> None:
    assert settings(document, env, **flags).filter.keep == keep


def test_a_setting_that_no_later_source_has_stays_as_in_the_file() -> None:
    loaded = settings({"filter": {"keep": 2, "slack": 0.5}, "policy": "spread"}, {"GPUTILE_FILTER_KEEP": "3"})
    assert (loaded.filter.keep, loaded.filter.slack, loaded.policy) == (3, 0.5, "spread")


@pytest.mark.parametrize("name", list(ALL))
def test_every_setting_has_a_variable(name: str) -> None:
    variable = "GPUTILE_" + name.upper().replace(".", "_")
    value = ",".join(ALL[name]) if isinstance(ALL[name], tuple) else str(ALL[name])
    assert settings(None, {variable: value.lower() if value in ("True", "False") else value}) == Settings()


def test_text_is_converted_to_the_type_of_the_setting() -> None:
    env = {"GPUTILE_TELL_NUDGE": "false", "GPUTILE_BIND_TIMEOUT": "2.5", "GPUTILE_LEADERSHIP_ENABLED": "true"}
    loaded = settings(None, env, body_limit="7")
    assert (loaded.tell.nudge, loaded.bind.timeout, loaded.leadership.enabled, loaded.body_limit) == (
        False,
        2.5,
        True,
        7,
    )


@pytest.mark.parametrize(
    "variable",
    [
        "GPUTILE_SCHEDULER_SERVICE_HOST",
        "GPUTILE_SCHEDULER_SERVICE_PORT",
        "GPUTILE_SCHEDULER_SERVICE_PORT_HTTPS",
        "GPUTILE_SCHEDULER_PORT",
        "GPUTILE_SCHEDULER_PORT_12345_TCP",
        "GPUTILE_SCHEDULER_PORT_12345_TCP_ADDR",
        "GPUTILE_SERVICE_HOST",
        "PATH",
        "XGPUTILE_FILTER_KEEP",
    ],
)
def test_environment_variables_of_kubernetes_are_ignored(variable: str) -> None:
    assert settings(None, {variable: "tcp://10.0.0.1:12345"}) == Settings()


@pytest.mark.parametrize(
    ("load", "message"),
    [
        pytest.param(lambda: settings({"polcy": "spread"}), "no setting `polcy`; did you mean `policy`", id="a-key"),
        pytest.param(lambda: settings({"keep": 4}), "no setting `keep`; did you mean `filter.keep`", id="no-section"),
        pytest.param(
            lambda: settings({"filter": {"kep": 4}}), "no setting `filter.kep`; did you mean `filter.keep`", id="inner"
        ),
        pytest.param(lambda: settings({"filtr": {}}), "no setting `filtr`; did you mean `filter`", id="a-section"),
        pytest.param(lambda: settings({1: 2}), "no setting `1`", id="a-number-as-key"),
        pytest.param(
            lambda: settings(None, {"GPUTILE_FILTER_KEPT": "1"}),
            "the variable GPUTILE_FILTER_KEPT; did you mean `GPUTILE_FILTER_KEEP`",
            id="a-variable",
        ),
        pytest.param(
            lambda: settings(filter__keap="1"),
            "--set: there is no setting `filter.keap`; did you mean `filter.keep`",
            id="a-flag",
        ),
        pytest.param(lambda: settings(keep="1"), "did you mean `filter.keep`", id="a-flag-without-its-section"),
        pytest.param(lambda: settings(filter="1"), "no setting `filter`", id="a-section-is-no-setting"),
    ],
)
def test_an_unknown_name_is_rejected_with_the_closest_known_one(load: Any, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        load()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        pytest.param("listen", "12345", "write HOST:PORT", id="a-port-alone"),
        pytest.param("listen", ":12345", "write HOST:PORT", id="no-host"),
        pytest.param("listen", "localhost:", "write HOST:PORT", id="no-port"),
        pytest.param("listen", "localhost:http", "write HOST:PORT", id="a-port-in-words"),
        pytest.param("listen", "localhost:65536", "write HOST:PORT", id="a-port-too-high"),
        pytest.param("listen", "localhost:-1", "write HOST:PORT", id="a-negative-port"),
        pytest.param("policy", "binpac", "did you mean binpack", id="a-policy-misspelt"),
        pytest.param("policy", "", "did you mean", id="no-policy"),
        pytest.param("other_agents", "ignore", "other_agents", id="one-of-two-words"),
        pytest.param("log_level", "loud", "log_level", id="one-of-four-words"),
        pytest.param("filter.keep", "0", "write a number above 0", id="keep-no-node"),
        pytest.param("filter.keep", "many", "filter.keep", id="a-number-in-words"),
        pytest.param("filter.keep", "1.5", "filter.keep", id="half-a-node"),
        pytest.param("body_limit", "0", "write a number above 0", id="no-body"),
        pytest.param("bind.timeout", "0", "`bind.timeout` is 0.0; write a number above 0", id="no-time"),
        pytest.param("bind.timeout", "-1", "write a number above 0", id="negative-time"),
        pytest.param("bind.timeout", "nan", "write a number above 0", id="time-that-is-no-number"),
        pytest.param("bind.attempt", "0", "write a number above 0", id="no-time-for-an-attempt"),
        pytest.param("audit", "0", "write a number above 0", id="audit-without-end"),
        pytest.param("ledger.reserve_ttl", "0", "write a number above 0", id="reservations-that-expire-at-once"),
        pytest.param("ledger.assume_ttl", "-5", "write a number above 0", id="assumptions-that-expire-at-once"),
        pytest.param("tell.per_second", "0", "write a number above 0", id="no-events-at-all"),
        pytest.param("tell.nudge", "maybe", "tell.nudge", id="neither-true-nor-false"),
        pytest.param("tls.certificate", "a.pem", "go together", id="a-certificate-without-its-key"),
        pytest.param("tls.key", "a.key", "go together", id="a-key-without-its-certificate"),
        pytest.param("tls.client_ca", "ca.pem", "`tls.client_ca` needs both", id="a-client-ca-without-tls"),
        pytest.param("dialects.gpushare_unit", "TiB", "gpushare_unit", id="a-unit-that-is-none"),
    ],
)
def test_an_invalid_value_is_rejected_with_a_message(name: str, value: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        SETTINGS.compose(None, {}, {name: value}, "settings")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param("filter.slack", "-1", id="less-than-no-slack-leaves-no-node"),
        pytest.param("filter.slack", "nan", id="slack-that-is-no-number"),
        pytest.param("leadership.renew", "0", id="a-renewal-without-end"),
        pytest.param("leadership.retry", "0", id="a-campaign-without-end"),
        pytest.param("leadership.duration", "1", id="a-lease-shorter-than-its-renewal"),
        pytest.param("api.connections", "-1", id="less-than-no-connection"),
        pytest.param("api.request_timeout", "-1", id="less-than-no-time"),
        pytest.param("tell.every", "nan", id="an-interval-that-is-no-number"),
    ],
)
def test_a_value_that_would_break_the_process_is_rejected(name: str, value: str) -> None:
    with pytest.raises(InputError):
        SETTINGS.compose(None, {}, {name: value}, "settings")


@pytest.mark.parametrize("document", [[], "policy", 7, True])
def test_a_file_that_is_no_mapping(document: Any) -> None:
    with pytest.raises(InputError, match=r"s\.yaml: settings are a YAML mapping"):
        settings(document)


def test_a_wrong_type_in_the_file_names_the_file_and_the_setting() -> None:
    with pytest.raises(InputError, match=r"s\.yaml: setting `filter`: expected a mapping, got 5"):
        settings({"filter": 5})


@pytest.mark.parametrize(
    ("listen", "want"),
    [("0.0.0.0:12345", ("0.0.0.0", 12345)), ("[::1]:0", ("::1", 0)), ("localhost:80", ("localhost", 80))],
)
def test_where_to_listen(listen: str, want: tuple[str, int]) -> None:
    assert settings(listen=listen).host_and_port == want


def test_every_setting_has_a_name_and_every_section_is_opened() -> None:
    assert {"listen", "filter.keep", "tls.client_ca", "leadership.renew", "dialects.nano_unit", "api.page"} <= set(ALL)
    assert "filter" not in ALL
    assert all(not isinstance(default, msgspec.Struct) for default in ALL.values())


def test_every_setting_is_explained() -> None:
    lines = explained(Settings()).splitlines()
    for line, following in itertools.pairwise(lines):
        is_value = ":" in following and not following.rstrip().endswith(":") and not following.lstrip().startswith("#")
        assert not is_value or line.lstrip().startswith("#"), f"this setting has no explanation: {following}"


def test_only_changed_settings_are_logged_at_the_start() -> None:
    assert SETTINGS.changed(SETTINGS.compose({"policy": "spread"}, {}, {"filter.keep": "4"}, "settings")) == {
        "policy": "spread",
        "filter.keep": 4,
    }
