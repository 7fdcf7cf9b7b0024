"""A ConfigMap's text to quotas: YAML as people write it, and the slips that YAML itself would pass over."""

import pytest

from gputile.kube.config_maps import ConfigMap, ConfigMapMeta, read_quotas
from gputile.model.errors import InputError
from gputile.model.quotas import Limit, Quota

TITLE = "ConfigMap kube-system/gputile-quota"
GOOD = """
namespaces:
  team-a: # researchers
    limits:
      - {model: A100, cards: 4}
    pools: [training]
"""


def test_yaml_is_read() -> None:
    want = {"team-a": Quota((Limit(model="A100", cards=400),), ("training",), TITLE)}
    assert read_quotas(GOOD, "quota.yaml", TITLE) == want


def test_the_old_key_is_json() -> None:
    want = {"a": Quota((Limit(model="T4", cards=100),), (), TITLE)}
    assert read_quotas('{"a": {"quota": {"T4": 1}}}', "gpu_quota", TITLE) == want


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param(None, "there is no key `quota.yaml` in it; delete it if nobody is to have a quota", id="no-key"),
        pytest.param("", "`quota.yaml` is empty", id="emptied"),
        pytest.param("namespaces: {a: {limits: [}", "is not the YAML that it should be", id="a-bracket-too-few"),
        pytest.param("namespaces:\n  a: {}\n  a: {limits: []}", "`a` stands there twice (line 3); keep one",
                     id="twice"),
        pytest.param("namespaces: {a: {limits: [{cards: 1, cards: 2}]}}", "`cards` stands there twice",
                     id="twice-inside"),
        pytest.param("namespaces: {a: &x {}, b: *x}", "refers to itself with `*name`; write it out", id="an-alias"),
        pytest.param("!!python/object:os.system {}", "is not the YAML that it should be", id="a-tag"),
        pytest.param("a: 1\n---\nb: 2", "is not the YAML that it should be", id="two-documents"),
        pytest.param("\x00", "is not the YAML that it should be", id="no-text"),
        pytest.param("[" * 10_000, "is not the YAML that it should be", id="very-deep"),
        pytest.param("2026-13-45: {}", "is not the YAML that it should be", id="a-day-that-never-was"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_says_why(text: str | None, said: str) -> None:
    with pytest.raises(InputError) as wrong:
        read_quotas(text, "quota.yaml", TITLE)
    assert said in str(wrong.value)
    assert "\n" not in str(wrong.value)


def test_an_object_has_its_texts_and_the_last_that_was_good() -> None:
    meta = ConfigMapMeta("q", "ns", "u", {"gputile.io/last-good-quota": "namespaces: {}"})
    found = ConfigMap(meta, {"quota.yaml": GOOD})
    assert (found.title, found.text("quota.yaml"), found.text("other")) == ("ConfigMap ns/q", GOOD, None)
    assert found.last_good == "namespaces: {}"
    assert (ConfigMap().text("x"), ConfigMap().last_good) == (None, None)
