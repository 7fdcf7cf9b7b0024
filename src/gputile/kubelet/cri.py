"""A client of the container runtime's CRI socket: whether CDI is enabled, and which containers run.

Whether CDI is enabled is read from the runtime's configuration (`Status` with `verbose`). It is an option, so the
runtime's version would be a guess.
"""

from pathlib import Path
from typing import TypeVar

import grpc
import msgspec

from gputile.kubelet import messages as wire
from gputile.kubelet.device_plugin import PLAIN_SOCKETS
from gputile.kubelet.grpc_errors import call_problem
from gputile.kubelet.protobuf import Message, decoder, encode
from gputile.model.errors import GputileError

CALL_TIMEOUT = 5.0  # seconds
RUNNING = 1  # CONTAINER_RUNNING of the CRI
UID, NAME = "io.kubernetes.pod.uid", "io.kubernetes.container.name"

M = TypeVar("M", bound=Message)


class RuntimeUnavailable(GputileError):
    """The runtime does not answer over its CRI socket; the message says why."""


class SocketReplaced(GputileError):
    """The runtime has created a new socket; the one that is mounted into this container stays dead."""


class CdiSupport(msgspec.Struct, frozen=True):
    """Whether the runtime supports CDI, in which folders it looks for specs, and the reason for the answer."""

    works: bool
    folders: tuple[str, ...] = ()
    why: str = ""


class RunningContainer(msgspec.Struct, frozen=True):
    """A running container, by the labels that the kubelet gave it."""

    pod: str  # UID
    container: str = ""


class RuntimeConfig(msgspec.Struct, rename={"enable_cdi": "enableCDI", "cdi_spec_dirs": "cdiSpecDirs"}):
    """The CDI options in the configuration that containerd returns."""

    enable_cdi: bool | None = None
    cdi_spec_dirs: list[str] | None = None


async def ask(socket: Path, folder: str) -> CdiSupport:
    """Query the runtime's CDI support; our specs are in `folder`. Raises `RuntimeUnavailable`."""
    response = await _call(socket, wire.RUNTIME_STATUS, wire.StatusRequest(verbose=True), wire.StatusResponse)
    return read_config(response.info.get("config", ""), folder)


async def running(socket: Path) -> dict[str, RunningContainer]:
    """The containers that run now, by their ID. Raises `RuntimeUnavailable`."""
    response = await _call(socket, wire.CONTAINERS, wire.Empty(), wire.ListContainersResponse)
    return {
        container.id: RunningContainer(container.labels.get(UID, ""), container.labels.get(NAME, ""))
        for container in response.containers
        if container.state == RUNNING
    }


async def _call(socket: Path, method: str, request: Message, response_type: type[M]) -> M:
    try:
        async with grpc.aio.insecure_channel(f"unix:{socket}", options=PLAIN_SOCKETS) as channel:
            call = channel.unary_unary(method, request_serializer=encode, response_deserializer=decoder(response_type))
            response: M | None = await call(request, timeout=CALL_TIMEOUT)
    except grpc.aio.AioRpcError as error:
        if _is_unlinked(socket):
            raise SocketReplaced(
                f"{socket}: the container runtime has replaced its socket, and the agent has the old one mounted; "
                "the agent exits, so that the kubelet restarts it with the new socket"
            ) from error
        raise RuntimeUnavailable(f"{socket}: the container runtime is unavailable: {call_problem(error)}") from error
    if response is None:  # what gRPC returns when the deserializer fails
        raise RuntimeUnavailable(f"{socket}: the container runtime's response is undecodable")
    return response


def _is_unlinked(socket: Path) -> bool:
    """Whether the file has no name on the node any more. This happens to a mount of a single socket when its server is
    restarted, and never where the socket's folder is mounted."""
    try:
        return socket.stat().st_nlink == 0
    except OSError:
        return False


def read_config(text: str, folder: str) -> CdiSupport:
    """containerd returns its configuration; a runtime without one counts as a runtime without CDI."""
    try:
        config = msgspec.json.decode(text.encode(), type=RuntimeConfig)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return CdiSupport(
            False,
            why="the container runtime does not report its configuration; if CDI is enabled there, set `cdi: yes`",
        )
    if not config.enable_cdi:
        return CdiSupport(False, why="CDI is disabled in the container runtime's configuration; set `enable_cdi` there")
    folders = tuple(config.cdi_spec_dirs or ())
    if folders and _normalized(folder) not in map(_normalized, folders):
        return CdiSupport(
            False,
            why=f"the container runtime reads CDI specs from {' and '.join(folders)}, "
            f"the agent writes them to {folder}; set `folders.cdi`",
        )
    return CdiSupport(True, folders, "CDI is enabled in the container runtime's configuration")


def _normalized(folder: str) -> str:
    """/var/run is a link to /run on all current systems."""
    path = folder.rstrip("/")
    return path.removeprefix("/var") if path.startswith("/var/run/") else path
