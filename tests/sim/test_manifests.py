"""The parser of manifest files."""

import pytest

from gputile.dialects.registry import read_pod
from gputile.model.errors import InputError
from gputile.model.refusals import BadRequest
from gputile.sim.manifests import load

POD = "spec: {containers: [{name: main}]}"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        pytest.param("kind: Pod\nmetadata: {name: p}\n" + POD, [("Pod", "p", 1)], id="a-pod"),
        pytest.param(f"kind: Pod\n{POD}\n---\nkind: Pod\n{POD}", [("Pod", "", 1)] * 2, id="several-documents"),
        pytest.param("kind: Deployment\nmetadata: {name: d}\nspec: {replicas: 3, template: {" + POD + "}}",
                     [("Deployment", "d", 3)], id="a-deployment"),
        pytest.param("kind: StatefulSet\nmetadata: {name: s}\nspec: {template: {" + POD + "}}",
                     [("StatefulSet", "s", 1)], id="a-statefulset-of-one"),
        pytest.param("kind: DaemonSet\nmetadata: {name: d}\nspec: {template: {" + POD + "}}",
                     [("DaemonSet", "d", 1)], id="a-daemonset"),
        pytest.param("kind: Job\nmetadata: {name: j}\nspec: {parallelism: 2, template: {" + POD + "}}",
                     [("Job", "j", 2)], id="a-job-counts-its-parallelism"),
        pytest.param("kind: CronJob\nmetadata: {name: c}\nspec: {jobTemplate: {spec: {template: {" + POD + "}}}}",
                     [("CronJob", "c", 1)], id="a-cronjob"),
        pytest.param("kind: List\nitems: [{kind: Pod, " + POD + "}, {kind: Service}]", [("Pod", "", 1)], id="a-list"),
        pytest.param("kind: PodList\nitems: [{metadata: {name: p}, " + POD + "}]", [("Pod", "p", 1)],
                     id="items-of-a-podlist-need-no-kind"),
        pytest.param('{"kind": "Pod", "metadata": {"name": "j"}}', [("Pod", "j", 1)], id="JSON-is-YAML"),
        pytest.param("kind: Service", [], id="a-service-creates-no-pods"),
        pytest.param("", [], id="an-empty-file"),
        pytest.param("---\n---\n", [], id="empty-documents"),
        pytest.param("kind: Deployment\nspec: 7", [("Deployment", "", 1)], id="a-broken-template-is-still-shown"),
        pytest.param("kind: Deployment\nspec: {replicas: many, template: {}}", [("Deployment", "", 1)],
                     id="invalid-replicas-count-as-one"),
    ],
)  # fmt: skip
def test_workloads_are_parsed(text: str, want: list[tuple[str, str, int]]) -> None:
    assert [(w.kind, w.name, w.replicas) for w in load(text, "f.yaml").workloads] == want


def test_dates_stay_text() -> None:
    (workload,) = load("kind: Pod\nmetadata: {name: p, labels: {day: 2026-01-01}}", "f").workloads
    assert workload.pod["metadata"]["labels"] == {"day": "2026-01-01"}


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        pytest.param("kind: Pod\n  bad: [", "f.yaml, line 2: invalid YAML", id="broken-YAML-names-the-line"),
        pytest.param("- 1\n- 2", "f.yaml: expected a Kubernetes object, found list", id="a-bare-list"),
        pytest.param("just words", "expected a Kubernetes object, found str", id="words"),
        pytest.param("{[1]: 2}", "invalid YAML or JSON", id="a-key-that-cannot-be-one"),
        pytest.param("[" * 3000, "f.yaml", id="nested-too-deeply"),
    ],
)
def test_invalid_files_get_an_error_message(text: str, fragment: str) -> None:
    with pytest.raises(InputError, match=r"f\.yaml") as caught:
        load(text, "f.yaml")
    assert fragment in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "a: !!int foo",
        "a: !!int ''",
        "a: !!bool foo",
        "a: 0x_",
        "a: " + "9" * 5000,
        "!!python/object:os.x {}",
    ],
    ids=["brackets", "bad-int", "empty-int", "bad-bool", "bad-hex", "long-number", "a-python-object"],
)
def test_hostile_yaml_gets_an_error_message(text: str) -> None:
    with pytest.raises(InputError, match=r"f\.yaml"):
        load(text, "f.yaml")


def test_an_odd_kind_creates_no_pods() -> None:
    assert load("kind: [a]", "f").others == ("['a']",)


def test_a_missing_template_is_rejected_when_the_pod_is_parsed() -> None:
    for text in ("kind: Deployment\nspec: 3", "kind: Pod"):
        (workload,) = load(text, "f").workloads
        assert isinstance(read_pod(workload.pod), BadRequest)


def test_a_cronjob_counts_its_parallelism_and_odd_list_items_are_skipped() -> None:
    cron = "kind: CronJob\nspec: {jobTemplate: {spec: {parallelism: 4, template: {" + POD + "}}}}"
    assert load(cron, "f").workloads[0].replicas == 4
    assert load("kind: List\nitems: [7, {kind: Pod, " + POD + "}]", "f").others == ("int in a list",)
