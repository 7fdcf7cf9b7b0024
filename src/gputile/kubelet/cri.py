"""The container runtime, asked over its CRI socket: whether it obeys CDI, and what runs.

Its configuration says whether it obeys CDI (`Status`, verbose): a version would be a guess, for it is an option.
"""

from pathlib import Path
from typing import TypeVar

import grpc
import msgspec

from gputile.kubelet import messages as wire
from gputile.kubelet.device_plugin import PLAIN_SOCKETS
from gputile.kubelet.protobuf import Message, decoder, encode
from gputile.model.errors import GputileError

PATIENCE = 5.0  # seconds
RUNNING = 1  # a container's state
UID, NAME = "io.kubernetes.pod.uid", "io.kubernetes.container.name"

M = TypeVar("M", bound=Message)


class RuntimeUnavailable(GputileError):
    """The runtime cannot be asked; the sentence says why."""


class SocketReplaced(GputileError):
    """The runtime made its socket anew, and the one that was mounted into our container is dead for good."""


class CdiSupport(msgspec.Struct, frozen=True):
    """Whether the runtime obeys CDI, where it looks for specs, and how we know."""

    works: bool
    folders: tuple[str, ...] = ()
    why: str = ""


class RunningContainer(msgspec.Struct, frozen=True):
    """A container that runs, as the kubelet had it labelled."""

    pod: str  # UID
    container: str = ""


class RuntimeConfig(msgspec.Struct, rename={"enable_cdi": "enableCDI", "cdi_spec_dirs": "cdiSpecDirs"}):
    enable_cdi: bool | None = None
    cdi_spec_dirs: list[str] | None = None


async def ask(socket: Path, folder: str) -> CdiSupport:
    """What the runtime behind the socket says of CDI; our specs are in `folder`. Raises `RuntimeUnavailable`."""
    said = await _call(socket, wire.RUNTIME_STATUS, wire.StatusRequest(verbose=True), wire.StatusResponse)
    return read_config(said.info.get("config", ""), folder)


async def running(socket: Path) -> dict[str, RunningContainer]:
    """The containers that run now, by their ID; raises `RuntimeUnavailable`."""
    said = await _call(socket, wire.CONTAINERS, wire.Empty(), wire.ListContainersResponse)
    alive = [one for one in said.containers if one.state == RUNNING]
    return {one.id: RunningContainer(one.labels.get(UID, ""), one.labels.get(NAME, "")) for one in alive}


async def _call(socket: Path, method: str, asked: Message, answer: type[M]) -> M:
    try:
        async with grpc.aio.insecure_channel(f"unix:{socket}", options=PLAIN_SOCKETS) as channel:
            call = channel.unary_unary(method, request_serializer=encode, response_deserializer=decoder(answer))
            said: M | None = await call(asked, timeout=PATIENCE)
    except grpc.aio.AioRpcError as no:
        if _is_unlinked(socket):
            raise SocketReplaced(
                f"the runtime has replaced its socket {socket}, while we keep the one that was mounted into it: "
                "the agent ends, so that the kubelet starts it with the new one"
            ) from no
        raise RuntimeUnavailable(f"the runtime at {socket} cannot be asked: {no.details()}") from no
    if said is None:  # gRPC's word for an answer that could not be read
        raise RuntimeUnavailable(f"what the runtime at {socket} answers cannot be read")
    return said


def _is_unlinked(socket: Path) -> bool:
    """Whether the file has no name on the node any more: so it is with a mount of one socket whose server was started
    anew, and never where the folder is mounted."""
    try:
        return socket.stat().st_nlink == 0
    except OSError:
        return False


def read_config(text: str, folder: str) -> CdiSupport:
    """containerd shows its configuration; whoever shows none has proven nothing."""
    try:
        config = msgspec.json.decode(text.encode(), type=RuntimeConfig)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return CdiSupport(False, why="the runtime does not show its configuration; if it obeys CDI, set `cdi: yes`")
    if not config.enable_cdi:
        return CdiSupport(False, why="CDI is off in the runtime's configuration; turn `enable_cdi` on")
    folders = tuple(config.cdi_spec_dirs or ())
    if folders and _plain(folder) not in map(_plain, folders):
        looks = " and ".join(folders)
        return CdiSupport(False, why=f"it looks for CDI specs in {looks}, and ours are in {folder}; set `folders.cdi`")
    return CdiSupport(True, folders, "its configuration says so")


def _plain(folder: str) -> str:
    """/var/run is a link to /run on every system of today."""
    path = folder.rstrip("/")
    return path.removeprefix("/var") if path.startswith("/var/run/") else path
