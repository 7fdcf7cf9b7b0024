"""A machine's Linux namespaces: `linux_namespaces.py new HOSTNAME BIND...` and `... enter PID TYPES PROGRAM ARG...`.

A script that `machines.Machine` runs between fork and exec; it must not import other modules of the tests.

`new` creates PID, mount, network and UTS namespaces and starts their process 1, which bind-mounts each BIND (FROM=TO,
or FROM=TO=ro), touches /run/booted and then only reaps orphans. It runs until it gets SIGTERM or its parent dies; then
the kernel kills every other process of the PID namespace, and removes mounts and network.
`enter` runs a program in the namespaces of these TYPES (mnt,pid,uts,net) of the `new` with this PID.
"""

import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWPID, CLONE_NEWNET = 0x00020000, 0x04000000, 0x20000000, 0x40000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE, MS_SHARED = 1, 32, 4096, 16384, 1 << 18, 1 << 20
PR_SET_PDEATHSIG = 1
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
BLOCKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    verb, *words = sys.argv[1:]
    if verb == "new":
        new(words[0], words[1:])
    enter(int(words[0]), words[1].split(","), words[2:])


def new(hostname: str, binds: list[str]) -> NoReturn:
    _call(LIBC.unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWPID | CLONE_NEWNET), "unshare")
    _run_and_exit(lambda: _run_process_one(hostname, binds))


def _run_process_one(hostname: str, binds: list[str]) -> NoReturn:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    _mount("none", "/", MS_REC | MS_PRIVATE)  # first of all: later mounts do not propagate to the host
    _mount("proc", "/proc", 0, "proc")
    for bind in binds:
        _bind(*bind.split("="))
    _mount("none", "/", MS_REC | MS_SHARED)  # as systemd does
    socket.sethostname(hostname)
    _loopback_up()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps orphans
    Path("/run/booted").touch()
    while True:
        signal.pause()


def _bind(source: str, target: str, how: str = "rw") -> None:
    _mount(source, target, MS_BIND | (MS_REC if Path(source).is_dir() else 0))
    if how == "ro":
        _mount("none", target, MS_REMOUNT | MS_BIND | MS_RDONLY)


def _loopback_up() -> None:
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


def enter(pid: int, types: list[str], argv: list[str]) -> NoReturn:
    cwd = Path.cwd()
    links = [f"/proc/{pid}/ns/{'pid_for_children' if kind == 'pid' else kind}" for kind in types]
    descriptors = [os.open(link, os.O_RDONLY | os.O_CLOEXEC) for link in links]  # all, before /proc changes
    for descriptor in descriptors:
        _call(LIBC.setns(descriptor, 0), "setns")
    os.chdir(cwd)
    _run_and_exit(lambda: os.execvp(argv[0], argv))


def _run_and_exit(program: Callable[[], NoReturn]) -> NoReturn:
    """Fork (only children enter a PID namespace), wait, and exit with the child's status.

    Signals go to the whole process group, so the child receives them as well; this process only waits for its exit.
    """
    former = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    child = os.fork()
    if child == 0:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
        program()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(status if status >= 0 else 128 - status)


def _mount(source: str, target: str, flags: int, kind: str = "none") -> None:
    done = LIBC.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None)
    _call(done, f"mount {source} on {target}")


def _call(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
