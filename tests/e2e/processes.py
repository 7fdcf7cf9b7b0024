"""Child processes that never outlive the tests, and waiting that says what it waited for.

Room:  each child has its own process group and a log file; the kernel kills it when pytest dies, even by kill -9.
Door:  `Child`, `free_port`, `wait_until`, `interruptible`.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

TETHER = Path(__file__).with_name("tether.py")
PORTS = range(20_000, 32_000)  # below the kernel's range for outgoing connections, so a port stays free over a restart
# The kernel's parent-death signal follows the *thread* that forked. This one lives as long as Python does.
_STARTER = ThreadPoolExecutor(1, thread_name_prefix="e2e-starter")
_given: set[int] = set()
_giving = threading.Lock()


class TookTooLong(AssertionError):
    """Something that had to happen did not; the text has the end of each log."""


class Child:
    """One program with its log: `start`, `stop`, `kill`, `restart`.

    stopped --start--> running --stop (TERM, then KILL) or kill--> stopped
                          +--ends by itself--> dead: `alive` is False, `status` its exit code
    """

    def __init__(self, name: str, argv: Sequence[str | Path], log: Path, env: Mapping[str, str], cwd: Path) -> None:
        self.name, self.log = name, log
        self._argv, self._env, self._cwd = [str(word) for word in argv], dict(env), cwd
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def status(self) -> int | None:
        """Its exit code; None while it runs or before it was started."""
        return self._process.poll() if self._process else None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> "Child":
        if self.alive:
            raise RuntimeError(f"{self.name} is running already as {self.pid}; stop it first, or use restart()")
        self._process = _STARTER.submit(self._spawn).result()
        return self

    def _spawn(self) -> subprocess.Popen[bytes]:
        tethered = [sys.executable, "-ISs", str(TETHER), str(os.getpid()), *self._argv]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                tethered,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                cwd=self._cwd,
                start_new_session=True,
            )

    def signal(self, number: int) -> None:
        """Send a signal to the child and its whole group; nothing if they are gone."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def stop(self, grace: float = 10.0) -> None:
        """Ask, wait, insist. Nothing of its group is left when this returns."""
        if self.alive and self._process is not None:
            self.signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(grace)
        self.kill()

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self._process.wait()

    def restart(self, grace: float = 10.0) -> "Child":
        self.stop(grace)
        return self.start()

    def tail(self, lines: int = 20) -> str:
        """The end of its log, under a heading that says whether it lives."""
        state = f"pid {self.pid}" if self.alive else f"exit code {self.status}"
        return f"--- {self.name} ({state}), end of {self.log}:\n{last_lines(self.log, lines)}"


def last_lines(path: Path, lines: int) -> str:
    if not path.exists():
        return "(no such file)"
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64 * 1024))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


def stop_all(children: Sequence[Child], grace: float = 5.0) -> None:
    """Stop them together: all are asked before any is waited for."""
    for child in children:
        child.signal(signal.SIGTERM)
    deadline = time.monotonic() + grace
    for child in children:
        child.stop(max(0.0, deadline - time.monotonic()))


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on and that this process gave to nobody else."""
    with _giving:
        for port in random.sample(PORTS, 500):
            if port not in _given and _bindable(port):
                _given.add(port)
                return port
    raise OSError(f"no free port of 127.0.0.1 in {PORTS.start}-{PORTS.stop}; see `ss -ltnp` for who holds them")


def _bindable(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return True
    return False


def wait_until(
    ready: Callable[[], T], seconds: float, what: str, watching: Sequence[Child] = (), every: float = 0.05
) -> T:
    """Ask `ready` until it says something true, and return that.

    Connections refused on the way are borne. A watched child that dies ends the waiting at once.
    """
    deadline, last = time.monotonic() + seconds, "nothing true yet"
    while True:
        try:
            if found := ready():
                return found
            last = f"last answer {found!r}"
        except (OSError, HTTPException) as refused:
            last = f"last error {type(refused).__name__}: {refused}"
        if dead := [child for child in watching if not child.alive]:
            raise TookTooLong(_story(f"{dead[0].name} ended while waiting for {what} ({last})", dead))
        if time.monotonic() > deadline:
            raise TookTooLong(_story(f"waited {seconds:g} s in vain for {what} ({last})", watching))
        time.sleep(every)


def _story(sentence: str, children: Sequence[Child]) -> str:
    return "\n".join([sentence, *(child.tail() for child in children)])


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the run as Ctrl-C does, so that what was started is stopped and removed.

    SIGINT too: a shell without job control starts background jobs with SIGINT ignored.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(f"signal {signal.Signals(number).name}")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
