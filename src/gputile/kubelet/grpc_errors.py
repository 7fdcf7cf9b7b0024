"""Errors of gRPC calls, in sentences of our own: gRPC's own text names its sockets' addresses and internal states."""

import grpc

from gputile.model.decode_errors import shortened

LONGEST = 200  # characters of a server's own message
BY_GRPC = {
    grpc.StatusCode.UNAVAILABLE: "no program answers on the socket",
    grpc.StatusCode.DEADLINE_EXCEEDED: "no response in time",
    grpc.StatusCode.UNIMPLEMENTED: "the program on the socket does not serve this API",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "the message is larger than gRPC accepts",
    grpc.StatusCode.CANCELLED: "the call was cancelled",
    grpc.StatusCode.INTERNAL: "the response is no valid gRPC message",
}


def call_problem(error: grpc.RpcError) -> str:
    """Why the call failed. Where the server itself rejected it (the kubelet reports a bad resource name as UNKNOWN),
    its message is passed on."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return "the gRPC call failed"
    return BY_GRPC.get(error.code()) or shortened(error.details() or "the server gave no reason", LONGEST)
