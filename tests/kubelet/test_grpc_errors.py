"""Errors of gRPC calls never show gRPC's own sentences."""

from pathlib import Path

import grpc
import pytest

from gputile.kubelet.device_plugin import SOCKET
from gputile.kubelet.grpc_errors import LONGEST, call_problem
from tests.kubelet.test_device_plugin import EchoPlugin, opened


def failure(code: grpc.StatusCode, details: str | None) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        pytest.param(
            failure(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses; last error: UNKNOWN: unix:/run"),
            "no program answers on the socket",
            id="a-dead-socket",
        ),
        pytest.param(
            failure(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"), "no response in time", id="a-time-out"
        ),
        pytest.param(
            failure(grpc.StatusCode.UNKNOWN, "the ResourceName is invalid"),
            "the ResourceName is invalid",
            id="a-rejection-keeps-the-servers-reason",
        ),
        pytest.param(failure(grpc.StatusCode.UNKNOWN, None), "the server gave no reason", id="a-rejection-without-one"),
        pytest.param(
            failure(grpc.StatusCode.UNKNOWN, "x" * 5000), "x" * LONGEST + "...", id="a-long-reason-is-shortened"
        ),
        pytest.param(grpc.RpcError("<_Rendezvous>"), "the gRPC call failed", id="any-other-error"),
    ],
)
def test_the_problem_of_a_call(error: grpc.RpcError, problem: str) -> None:
    assert call_problem(error) == problem


async def test_a_dead_kubelet_socket_is_named(tmp_path: Path) -> None:
    (tmp_path / SOCKET).touch()  # nobody listens
    async with opened(EchoPlugin(), tmp_path) as (_, changes):
        await changes.wait(lambda reasons: reasons != [])
    assert changes.reasons[0] == (
        f"{tmp_path / SOCKET}: the kubelet did not accept the registration: no program answers on the socket"
    )
