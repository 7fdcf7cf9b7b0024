"""Protocol buffers: known bytes, round trips, and invalid bytes."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputile.kubelet import messages as wire
from gputile.kubelet import protobuf
from gputile.kubelet.protobuf import InvalidMessage, Message, decode, encode
from tests.effort import examples


@pytest.mark.parametrize(
    ("message", "bytes_"),
    [
        pytest.param(wire.Empty(), b"", id="an-empty-message"),
        pytest.param(wire.DevicePluginOptions(), b"", id="defaults-are-not-sent"),
        pytest.param(wire.DevicePluginOptions(pre_start_required=True), b"\x08\x01", id="a-bool-is-a-number"),
        pytest.param(wire.CDIDevice(name="a=b"), b"\x0a\x03a=b", id="a-string-has-its-length"),
        pytest.param(wire.DeviceIds(ids=["x", ""]), b"\x0a\x01x\x0a\x00", id="a-list-has-empty-items-too"),
        pytest.param(
            wire.ContainerPreferredAllocationRequest(size=300), b"\x18\xac\x02", id="numbers-of-several-bytes"
        ),
        pytest.param(wire.NUMANode(id=-1), b"\x08" + b"\xff" * 9 + b"\x01", id="a-negative-number-takes-ten-bytes"),
        pytest.param(
            wire.ContainerAllocateResponse(envs={"A": "1"}),
            b"\x0a\x06\x0a\x01A\x12\x011",
            id="a-map-is-a-list-of-entries",
        ),
        pytest.param(
            wire.RegisterRequest(
                endpoint="e", resource_name="r", options=wire.DevicePluginOptions(pre_start_required=True)
            ),
            b"\x0a\x07v1beta1\x12\x01e\x1a\x01r\x22\x02\x08\x01",
            id="a-message-in-a-message",
        ),
        pytest.param(
            wire.ListAndWatchResponse(devices=[wire.AdvertisedDevice(id="d", health="Healthy")]),
            b"\x0a\x0c\x0a\x01d\x12\x07Healthy",
            id="an-empty-message-inside-is-not-sent",
        ),
    ],
)
def test_known_bytes(message: Message, bytes_: bytes) -> None:
    assert encode(message) == bytes_
    assert decode(type(message), bytes_) == message


TEXT = st.text(max_size=20)
ALLOCATIONS = st.builds(
    wire.ContainerAllocateResponse,
    envs=st.dictionaries(TEXT, TEXT, max_size=3),
    mounts=st.lists(st.builds(wire.Mount, container_path=TEXT, host_path=TEXT, read_only=st.booleans()), max_size=2),
    annotations=st.dictionaries(TEXT, TEXT, max_size=2),
    cdi_devices=st.lists(st.builds(wire.CDIDevice, name=TEXT), max_size=2),
)


@given(ALLOCATIONS)
@examples(100)
def test_encoded_messages_decode_to_themselves(message: wire.ContainerAllocateResponse) -> None:
    assert decode(wire.ContainerAllocateResponse, encode(message)) == message


@given(st.binary(max_size=60))
@examples(300)
def test_any_bytes_decode_or_are_invalid(data: bytes) -> None:
    with suppress(InvalidMessage):
        assert isinstance(decode(wire.ContainerAllocateResponse, data), wire.ContainerAllocateResponse)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        pytest.param(b"\x0a\x05ab", "truncated by 3 bytes", id="a-truncated-string"),
        pytest.param(b"\x18\xac", "ends inside a varint", id="a-truncated-number"),
        pytest.param(b"\x18" + b"\xff" * 11, "more than ten bytes", id="a-number-that-is-too-long"),
        pytest.param(b"\x00\x01", "number 0", id="field-number-zero"),
        pytest.param(b"\x0b", "wire type 3", id="a-group"),
        pytest.param(b"\x08\x01", "wrong wire type", id="a-number-instead-of-a-string"),
        pytest.param(b"\x0a\x01\xff", "invalid UTF-8", id="a-string-that-is-not-utf-8"),
    ],
)
def test_errors_have_a_reason(data: bytes, error: str) -> None:
    with pytest.raises(InvalidMessage, match=error):
        decode(wire.ContainerPreferredAllocationRequest, data)


def test_fields_of_a_newer_version_are_skipped() -> None:
    newer = b"\x0a\x01a" + b"\xa2\x06\x03new" + b"\xa9\x06" + bytes(8) + b"\xad\x06" + bytes(4)
    assert decode(wire.CDIDevice, newer) == wire.CDIDevice(name="a")


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x08\x01" * 11, id="numbers"),
        pytest.param(b"\x0a\x00" * 11, id="empty-messages"),
        pytest.param(b"\x0a\x0c" + b"\x0a\x00" * 6 + b"\x0a\x08" + b"\x0a\x00" * 4, id="nested-messages-included"),
        pytest.param(b"\xfa\x7f\x00" * 11, id="unknown-fields"),
    ],
)
def test_a_message_with_too_many_fields_is_invalid(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen mebibytes of fields would block the agent for ten seconds."""
    monkeypatch.setattr(protobuf, "MOST_FIELDS", 10)
    kind = wire.AllocateRequest if data[0] == 0x0A else wire.NUMANode
    with pytest.raises(InvalidMessage, match="more than 10 fields"):
        decode(kind, data)
