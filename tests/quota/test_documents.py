"""Quota documents, ours and gpu-admission's: what each key means, and what the error of a mistake says."""

from typing import Any

import pytest

from gputile.model.errors import InputError
from gputile.quota.documents import merged, read_old, read_ours
from gputile.quota.limits import Limit, Quota

HERE = "ConfigMap kube-system/gputile-quota"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        pytest.param({"limits": [{"model": "A100", "cards": 4}]}, Quota((Limit(model="A100", cards=400),)),
                     id="cards"),
        pytest.param({"limits": [{"model": "T4", "cards": 2.5}]}, Quota((Limit(model="T4", cards=250),)),
                     id="half-a-card"),
        pytest.param({"limits": [{"model": "T4", "cards": "0.01"}]}, Quota((Limit(model="T4", cards=1),)),
                     id="a-hundredth-of-a-card-in-quotes"),
        pytest.param({"limits": [{"memory": "160Gi", "cores": 250}]},
                     Quota((Limit(model="*", memory=160 * 1024, cores=250),)), id="any-model-memory-and-cores"),
        pytest.param({"limits": [{"model": "T4"}]}, Quota((Limit(model="T4"),)), id="as-much-as-there-is-of-one-model"),
        pytest.param({"limits": []}, Quota(), id="nothing-at-all"),
        pytest.param({"pools": ["blue", "red"]}, Quota((Limit(model="*"),), ("blue", "red")), id="pools-only"),
        pytest.param({}, Quota((Limit(model="*"),)), id="no-keys"),
        pytest.param({"limits": [{"cards": 0}]}, Quota((Limit(model="*", cards=0),)), id="none"),
    ],
)  # fmt: skip
def test_what_a_namespace_is_allowed(text: Any, want: Quota) -> None:
    assert read_ours({"namespaces": {"team-a": text}}, HERE) == {
        "team-a": Quota(want.limits, want.pools, HERE),
    }


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        pytest.param(None, "`quota.yaml` is empty; write `namespaces: {}` for no quotas", id="empty"),
        pytest.param([], "expected a mapping, got a list; see docs/quota.md", id="a-list"),
        pytest.param({"team-a": {}}, "the field `team-a` does not exist", id="namespaces-forgotten"),
        pytest.param({"namespaces": {"a": {"limit": []}}}, "namespace `a`: the field `limit` does not exist",
                     id="an-unknown-key"),
        pytest.param({"namespaces": {"a": {"limits": [{"cards": -1}]}}},
                     "namespace `a`: model `*`: `cards` is -1; write a number such as 4 or 2.5", id="below-zero"),
        pytest.param({"namespaces": {"a": {"limits": [{"cards": 0.001}]}}}, "`cards` is 0.001", id="too-fine"),
        pytest.param({"namespaces": {"a": {"limits": [{"cards": "four"}]}}}, "`cards` is 'four'", id="no-number"),
        pytest.param({"namespaces": {"a": {"limits": [{"cards": float("nan")}]}}}, "`cards` is nan", id="nan"),
        pytest.param({"namespaces": {"a": {"limits": [{"cards": True}]}}},
                     "`limits[0].cards`: expected a number or text, got true or false",
                     id="true-is-not-a-number"),
        pytest.param({"namespaces": {"a": {"limits": [{"model": "T4", "memory": 160}]}}},
                     "model `T4`: `memory` is 160; write it with a unit, such as 160Gi", id="memory-without-a-unit"),
        pytest.param({"namespaces": {"a": {"limits": [{"memory": "1k"}]}}}, "`memory` is '1k'",
                     id="less-than-a-mebibyte"),
        pytest.param({"namespaces": {"a": {"limits": [{"cores": 1.5}]}}}, "`cores` is 1.5; write percent of one GPU",
                     id="cores-are-percent"),
        pytest.param({"namespaces": {"a": {"limits": [{"model": ""}]}}}, "a limit has an empty `model`", id="no-model"),
        pytest.param({"namespaces": {"a": {"limits": [{"cards": 1}, {"cards": 2}]}}}, "has two limits",
                     id="two-limits-for-one-model"),
        pytest.param({"namespaces": {"a": {"pools": [""]}}}, "a pool has no name", id="no-pool"),
        pytest.param({"namespaces": {"a": None}}, "namespace `a`: expected a mapping, got nothing",
                     id="null-instead-of-a-mapping"),
    ],
)  # fmt: skip
def test_an_error_says_where_it_is_and_what_to_write(tree: Any, message: str) -> None:
    with pytest.raises(InputError) as raised:
        read_ours(tree, HERE)
    assert message in str(raised.value)
    assert str(raised.value).startswith(HERE)


OLD = "ConfigMap kube-system/gpuquota"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        pytest.param('{"a":{"quota":{"M40":2,"P100":3},"pool":["wx"]}}',
                     Quota((Limit(model="M40", cards=200), Limit(model="P100", cards=300)), ("wx",), OLD), id="usual"),
        pytest.param('{"a":{"quota":{}}}', Quota((), (), OLD), id="an-empty-quota-allows-nothing"),
        pytest.param('{"a":{}}', Quota((), (), OLD), id="a-missing-quota-allows-nothing"),
        pytest.param('{"a":{"Quota":{"T4":1},"pool":null,"note":"x"}}', Quota((Limit(model="T4", cards=100),), (), OLD),
                     id="read-as-go-reads-it"),
    ],
)  # fmt: skip
def test_gpu_admissions_document_is_parsed(text: str, want: Quota) -> None:
    assert read_old(text, OLD) == {"a": want}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"a":1}', '{"a":{"quota":{"T4":"x"}}}', '{"a":{"quota":{"T4":-1}}}', '{"a":{"pool":3}}']
)
def test_an_invalid_document_of_gpu_admission_is_rejected(text: str) -> None:
    with pytest.raises(InputError, match="ConfigMap kube-system/gpuquota"):
        read_old(text, OLD)


def test_ours_counts_before_the_old_namespace_by_namespace() -> None:
    ours = {"a": Quota(source="ours"), "*": Quota(source="default")}
    old = {"a": Quota(source="old"), "b": Quota(source="old")}
    assert {name: quota.source for name, quota in merged(ours, old).items()} == {
        "a": "ours",
        "b": "old",
        "*": "default",
    }
