"""A machine's namespaces: `spaces.py new HOSTNAME BIND...`, `spaces.py enter PID SPACES PROGRAM ARG...`.

Room:  a script, run between fork and exec as tether.py is; it imports nothing of the tests.
       `new` makes namespaces for processes, mounts, network and host name, and starts their process 1, which mounts
       what the BINDs say (FROM=TO, or FROM=TO=ro), touches /run/booted and then only buries the dead. It lives until
       it is told to stop or its parent dies; then the kernel kills all others there, and mounts and network go too.
       `enter` runs a program in the SPACES (mnt,pid,uts,net) of the `new` that has this PID.
Door:  `machines.Machine`.
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
DEAF = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    verb, *words = sys.argv[1:]
    if verb == "new":
        new(words[0], words[1:])
    enter(int(words[0]), words[1].split(","), words[2:])


def new(hostname: str, binds: list[str]) -> NoReturn:
    _call(LIBC.unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWPID | CLONE_NEWNET), "unshare")
    _end_with(lambda: _be_process_one(hostname, binds))


def _be_process_one(hostname: str, binds: list[str]) -> NoReturn:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    _mount("none", "/", MS_REC | MS_PRIVATE)  # first of all: from here on no mount is seen outside
    _mount("proc", "/proc", 0, "proc")
    for bind in binds:
        _bind(*bind.split("="))
    _mount("none", "/", MS_REC | MS_SHARED)  # as on a machine run by systemd
    socket.sethostname(hostname)
    _loopback_up()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries orphans
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


def enter(keeper: int, spaces: list[str], argv: list[str]) -> NoReturn:
    cwd = Path.cwd()
    links = [f"/proc/{keeper}/ns/{'pid_for_children' if space == 'pid' else space}" for space in spaces]
    doors = [os.open(link, os.O_RDONLY | os.O_CLOEXEC) for link in links]  # all, before the view of /proc changes
    for door in doors:
        _call(LIBC.setns(door, 0), "setns")
    os.chdir(cwd)
    _end_with(lambda: os.execvp(argv[0], argv))


def _end_with(program: Callable[[], NoReturn]) -> NoReturn:
    """Fork (a namespace of processes takes in only children), wait, and end as the child does.

    Who stops us signals our whole group, so the child hears it as well; we wait for it to end in its own time.
    """
    former = signal.pthread_sigmask(signal.SIG_BLOCK, DEAF)
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
