"""The kubelet's checkpoint, in the formats of its versions."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from gputile.kubelet import checkpoint
from gputile.kubelet import messages as wire
from gputile.kubelet.checkpoint import CHECKPOINT, CheckpointEntry, UnreadableCheckpoint, read_checkpoint, registered
from gputile.kubelet.protobuf import encode

RESPONSE = base64.b64encode(
    encode(wire.ContainerAllocateResponse(cdi_devices=[wire.CDIDevice(name="gputile.io/slot=ab")]))
).decode()


def entry(ids: Any, **more: Any) -> dict[str, Any]:
    return {"PodUID": "u1", "ContainerName": "c", "ResourceName": "gputile.io/gpu", "DeviceIDs": ids, **more}


def written(folder: Path, *entries: dict[str, Any]) -> Path:
    content = {"Data": {"PodDeviceEntries": list(entries), "RegisteredDevices": {}}, "Checksum": 7}
    (folder / CHECKPOINT).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("written_entry", "expected"),
    [
        pytest.param(
            entry({"-1": ["b", "a"]}, AllocResp=RESPONSE),
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
            id="a-response-of-another-plugin",
        ),
    ],
)
def test_the_formats_of_the_checkpoint(
    tmp_path: Path, written_entry: dict[str, Any], expected: CheckpointEntry
) -> None:
    assert read_checkpoint(written(tmp_path, written_entry)) == (expected,)


def test_which_devices_are_registered(tmp_path: Path) -> None:
    content = {"Data": {"RegisteredDevices": {"r": ["b", "a"], "s": None}}, "Checksum": 7}
    (tmp_path / CHECKPOINT).write_text(json.dumps(content))
    assert [registered(tmp_path, name) for name in ("r", "s", "t")] == [frozenset("ab"), frozenset(), frozenset()]


def test_a_kubelet_without_a_checkpoint(tmp_path: Path) -> None:
    assert read_checkpoint(tmp_path) == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param("", "the JSON ends too early", id="an-empty-file"),
        pytest.param("{", "the JSON ends too early", id="half-a-file"),
        pytest.param("[]", "expected a mapping, got a list$", id="another-format"),
        pytest.param('{"Data": 1}', "`Data`: expected a mapping, got a whole number$", id="data-of-another-type"),
        pytest.param(
            '{"Data":{"PodDeviceEntries":7}}',
            "`Data.PodDeviceEntries`: expected a list, got a whole number$",
            id="entries-of-another-type",
        ),
        pytest.param('{"x":' + "[" * 60_000, "", id="deep-brackets"),
    ],
)
def test_an_undecodable_checkpoint_is_an_error(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / CHECKPOINT).write_text(text)
    with pytest.raises(UnreadableCheckpoint, match=f"{CHECKPOINT}: .*{why}"):
        read_checkpoint(tmp_path)


GOOD = {"PodUID": "a", "ContainerName": "c", "ResourceName": "r", "DeviceIDs": {"0": ["d"]}}


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param({"PodUID": 1}, id="of-a-wrong-type"),
        pytest.param({}, id="empty"),
        pytest.param([], id="a-list"),
        pytest.param(GOOD | {"DeviceIDs": {"0": [{}]}}, id="with-devices-of-another-type"),
    ],
)
def test_an_undecodable_entry_is_skipped_and_the_others_are_read(tmp_path: Path, bad: object) -> None:
    content = {"Data": {"PodDeviceEntries": [bad, GOOD]}, "Checksum": 7}
    (tmp_path / CHECKPOINT).write_text(json.dumps(content))
    assert [entry.pod for entry in read_checkpoint(tmp_path)] == ["a"]


def test_an_entry_of_deep_brackets_is_skipped_too(tmp_path: Path) -> None:
    deep = json.dumps({"Data": {"PodDeviceEntries": [GOOD, 7]}}).replace("7", "[" * 900 + "]" * 900)
    (tmp_path / CHECKPOINT).write_text(deep)
    assert [entry.pod for entry in read_checkpoint(tmp_path)] == ["a"]


@pytest.mark.parametrize(
    "response",
    [
        pytest.param("no base64", id="not-base64"),
        pytest.param("////", id="not-a-message"),
        pytest.param("A" * 100_000, id="a-hundred-thousand-zeros"),
    ],
)
def test_an_undecodable_response_has_no_cdi_devices(tmp_path: Path, response: str) -> None:
    (entry,) = read_checkpoint(written(tmp_path, GOOD | {"AllocResp": response}))
    assert entry.cdi == ()


def test_a_checkpoint_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "LARGEST", 100)
    (tmp_path / CHECKPOINT).write_text('{"Data":{}}' + " " * 90)
    with pytest.raises(UnreadableCheckpoint, match="more than 100 bytes"):
        read_checkpoint(tmp_path)
