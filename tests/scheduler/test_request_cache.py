"""The pod that kube-scheduler sends with every verb is parsed once per version; a changed body is parsed again."""

from typing import Any

import msgspec
import pytest

from gputile.dialects import registry
from gputile.dialects.kube_objects import Pod
from gputile.dialects.settings import DEFAULTS, DialectSettings
from gputile.model.requests import PodRequest
from gputile.scheduler.state import pod_requests
from gputile.scheduler.state.pod_requests import RequestCache
from gputile.testing.builders import pod as manifest

GPU = {"gputile.io/gpu": 1}
OTHER = DialectSettings(gpushare_unit="MiB")


def pod(limits: dict[str, Any] = GPU, version: str | None = "7", **more: Any) -> Pod:
    document = manifest(limits, **more)
    document["metadata"]["resourceVersion"] = version
    return msgspec.convert(document, Pod)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Pod]:
    """The pods that were parsed."""
    parsed: list[Pod] = []

    def counted(pod: Pod, settings: DialectSettings) -> Any:
        parsed.append(pod)
        return registry.read_pod(pod, settings)

    monkeypatch.setattr(pod_requests, "registry", type("Speaking", (), {"read_pod": staticmethod(counted)}))
    return parsed


@pytest.mark.parametrize(
    ("first", "second", "settings", "count"),
    [
        pytest.param(pod(), pod(), DEFAULTS, 1, id="the-same-pod-is-parsed-once"),
        pytest.param(pod({"cpu": 1}), pod({"cpu": 1}), DEFAULTS, 1, id="a-pod-without-gpus-is-parsed-once"),
        pytest.param(pod(version="7"), pod(version="8"), DEFAULTS, 2, id="another-version-is-parsed-again"),
        pytest.param(pod(uid="a"), pod(uid="b"), DEFAULTS, 2, id="another-pod-is-parsed"),
        pytest.param(pod(), pod({"gputile.io/gpu": 2}), DEFAULTS, 2, id="another-spec-under-the-same-version"),
        pytest.param(
            pod(),
            pod(annotations={"gputile.io/model": "T4"}),
            DEFAULTS,
            2,
            id="other-annotations-under-the-same-version",
        ),
        pytest.param(pod(), pod(labels={"a": "b"}), DEFAULTS, 2, id="other-labels-under-the-same-version"),
        pytest.param(pod(), pod(), OTHER, 2, id="with-other-settings-it-is-parsed-again"),
        pytest.param(pod(version=None), pod(version=None), DEFAULTS, 2, id="a-pod-without-a-version-is-not-cached"),
        pytest.param(pod(uid=""), pod(uid=""), DEFAULTS, 2, id="a-pod-without-a-uid-is-not-cached"),
    ],
)
def test_when_a_pod_is_parsed(first: Pod, second: Pod, settings: DialectSettings, count: int, reads: list[Pod]) -> None:
    cache = RequestCache()
    cache.read(first, DEFAULTS)
    assert cache.read(second, settings) == registry.read_pod(second, settings)
    assert len(reads) == count


def test_the_most_recently_used_pods_are_kept(reads: list[Pod]) -> None:
    cache = RequestCache(size=2)
    for uid in ("a", "b", "a", "c", "a", "b"):
        assert isinstance(cache.read(pod(uid=uid), DEFAULTS), PodRequest)
    assert [read.uid for read in reads] == ["a", "b", "c", "b"]
