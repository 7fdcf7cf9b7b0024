"""The kubelet's checkpoint, in the shapes it has had, and podresources as one entry per device or per container."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from gputile.kubelet import checkpoint
from gputile.kubelet import messages as wire
from gputile.kubelet.checkpoint import CHECKPOINT, CheckpointEntry, UnreadableCheckpoint, read_checkpoint, registered
from gputile.kubelet.protobuf import encode

ANSWER = base64.b64encode(
    encode(wire.ContainerAllocateResponse(cdi_devices=[wire.CDIDevice(name="gputile.io/slot=ab")]))
).decode()


def entry(ids: Any, **more: Any) -> dict[str, Any]:
    return {"PodUID": "u1", "ContainerName": "c", "ResourceName": "gputile.io/gpu", "DeviceIDs": ids, **more}


def written(folder: Path, *entries: dict[str, Any]) -> Path:
    said = {"Data": {"PodDeviceEntries": list(entries), "RegisteredDevices": {}}, "Checksum": 7}
    (folder / CHECKPOINT).write_text(json.dumps(said))
    return folder


@pytest.mark.parametrize(
    ("said", "want"),
    [
        pytest.param(
            entry({"-1": ["b", "a"]}, AllocResp=ANSWER),
            CheckpointEntry(
                pod="u1",
                container="c",
                resource="gputile.io/gpu",
                ids=frozenset("ab"),
                cdi=("gputile.io/slot=ab",),
            ),
            id="by-numa-node",
        ),
        pytest.param(
            entry({"0": ["a"], "1": ["b"], "2": None}),
            CheckpointEntry(pod="u1", container="c", resource="gputile.io/gpu", ids=frozenset("ab")),
            id="over-two-numa-nodes",
        ),
        pytest.param(
            entry(["a"]),
            CheckpointEntry(pod="u1", container="c", resource="gputile.io/gpu", ids=frozenset("a")),
            id="before-1.20",
        ),
        pytest.param(
            entry(None, AllocResp=None),
            CheckpointEntry(pod="u1", container="c", resource="gputile.io/gpu", ids=frozenset()),
            id="no-devices",
        ),
        pytest.param(
            entry(["a"], AllocResp="%%%"),
            CheckpointEntry(pod="u1", container="c", resource="gputile.io/gpu", ids=frozenset("a")),
            id="another-plugins-answer",
        ),
    ],
)
def test_the_shapes_of_the_checkpoint(tmp_path: Path, said: dict[str, Any], want: CheckpointEntry) -> None:
    assert read_checkpoint(written(tmp_path, said)) == (want,)


def test_which_devices_a_kubelet_last_heard_of(tmp_path: Path) -> None:
    said = {"Data": {"RegisteredDevices": {"r": ["b", "a"], "s": None}}, "Checksum": 7}
    (tmp_path / CHECKPOINT).write_text(json.dumps(said))
    assert [registered(tmp_path, name) for name in ("r", "s", "t")] == [frozenset("ab"), frozenset(), frozenset()]


def test_a_kubelet_that_never_gave_anything_out(tmp_path: Path) -> None:
    assert read_checkpoint(tmp_path) == ()


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="an-empty-file"),
        pytest.param("{", id="half-a-file"),
        pytest.param("[]", id="another-shape"),
        pytest.param('{"Data": 1}', id="data-that-is-none"),
        pytest.param('{"Data":{"PodDeviceEntries":7}}', id="entries-that-are-none"),
        pytest.param('{"x":' + "[" * 60_000, id="brackets"),
    ],
)
def test_a_checkpoint_that_nobody_understands(tmp_path: Path, text: str) -> None:
    (tmp_path / CHECKPOINT).write_text(text)
    with pytest.raises(UnreadableCheckpoint, match=CHECKPOINT):
        read_checkpoint(tmp_path)


GOOD = {"PodUID": "a", "ContainerName": "c", "ResourceName": "r", "DeviceIDs": {"0": ["d"]}}


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param({"PodUID": 1}, id="of-a-wrong-type"),
        pytest.param({}, id="empty"),
        pytest.param([], id="a-list"),
        pytest.param(GOOD | {"DeviceIDs": {"0": [{}]}}, id="with-devices-that-are-none"),
    ],
)
def test_an_entry_that_nobody_understands_is_left_out_and_the_others_are_read(tmp_path: Path, bad: object) -> None:
    said = {"Data": {"PodDeviceEntries": [bad, GOOD]}, "Checksum": 7}
    (tmp_path / CHECKPOINT).write_text(json.dumps(said))
    assert [one.pod for one in read_checkpoint(tmp_path)] == ["a"]


def test_an_entry_of_deep_brackets_is_left_out_too(tmp_path: Path) -> None:
    deep = json.dumps({"Data": {"PodDeviceEntries": [GOOD, 7]}}).replace("7", "[" * 900 + "]" * 900)
    (tmp_path / CHECKPOINT).write_text(deep)
    assert [one.pod for one in read_checkpoint(tmp_path)] == ["a"]


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param("no base64", id="no-base64"),
        pytest.param("////", id="no-message"),
        pytest.param("A" * 100_000, id="a-hundred-thousand-zeros"),
    ],
)
def test_an_answer_that_is_none_of_ours_names_no_cdi_devices(tmp_path: Path, answer: str) -> None:
    (one,) = read_checkpoint(written(tmp_path, GOOD | {"AllocResp": answer}))
    assert one.cdi == ()


def test_a_checkpoint_without_end_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "LARGEST", 100)
    (tmp_path / CHECKPOINT).write_text('{"Data":{}}' + " " * 90)
    with pytest.raises(UnreadableCheckpoint, match="more than 100 bytes"):
        read_checkpoint(tmp_path)
