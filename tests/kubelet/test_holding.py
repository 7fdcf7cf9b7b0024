"""The kubelet's checkpoint, in the shapes it has had, and podresources as one entry per device or per container."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from gputile.kubelet import messages as wire
from gputile.kubelet.holding import CHECKPOINT, Held, Unreadable, read_checkpoint, registered
from gputile.kubelet.protobuf import encode

ANSWER = base64.b64encode(encode(wire.Allocation(cdi_devices=[wire.CdiDevice(name="gputile.io/slot=ab")]))).decode()


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
            Held(
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
            Held(pod="u1", container="c", resource="gputile.io/gpu", ids=frozenset("ab")),
            id="over-two-numa-nodes",
        ),
        pytest.param(
            entry(["a"]),
            Held(pod="u1", container="c", resource="gputile.io/gpu", ids=frozenset("a")),
            id="before-1.20",
        ),
        pytest.param(
            entry(None, AllocResp=None),
            Held(pod="u1", container="c", resource="gputile.io/gpu", ids=frozenset()),
            id="no-devices",
        ),
        pytest.param(
            entry(["a"], AllocResp="%%%"),
            Held(pod="u1", container="c", resource="gputile.io/gpu", ids=frozenset("a")),
            id="another-plugins-answer",
        ),
    ],
)
def test_the_shapes_of_the_checkpoint(tmp_path: Path, said: dict[str, Any], want: Held) -> None:
    assert read_checkpoint(written(tmp_path, said)) == (want,)


def test_which_devices_a_kubelet_last_heard_of(tmp_path: Path) -> None:
    said = {"Data": {"RegisteredDevices": {"r": ["b", "a"], "s": None}}, "Checksum": 7}
    (tmp_path / CHECKPOINT).write_text(json.dumps(said))
    assert [registered(tmp_path, name) for name in ("r", "s", "t")] == [frozenset("ab"), frozenset(), frozenset()]


def test_a_kubelet_that_never_gave_anything_out(tmp_path: Path) -> None:
    assert read_checkpoint(tmp_path) == ()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"Data": 1}', '{"Data":{"PodDeviceEntries":[{"PodUID":1}]}}'])
def test_a_checkpoint_that_nobody_understands(tmp_path: Path, text: str) -> None:
    (tmp_path / CHECKPOINT).write_text(text)
    with pytest.raises(Unreadable, match=CHECKPOINT):
        read_checkpoint(tmp_path)
