"""Child processes that must not outlive the tests, free ports, and waits whose timeout names the awaited condition.

Each child has its own process group and a log file; the kernel kills it when pytest dies, even by kill -9.
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
_allocated: set[int] = set()
_allocating = threading.Lock()


class TookTooLong(AssertionError):
    """An awaited condition did not become true in time; the message has the end of each log."""


class Child:
    """One program with its log: `start`, `stop`, `kill`, `restart`.

    stopped --start--> running --stop (TERM, then KILL) or kill--> stopped
                          +--exits by itself--> dead: `alive` is False, `status` its exit code
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
        """Send a signal to the child's process group; a group that is gone is ignored."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def stop(self, grace: float = 10.0) -> None:
        """SIGTERM, wait, SIGKILL. No process of its group is left when this returns."""
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
        """The end of its log, under a heading with its state."""
        state = f"pid {self.pid}" if self.alive else f"exit code {self.status}"
        return f"--- {self.name} ({state}), end of {self.log}:\n{last_lines(self.log, lines)}"


def last_lines(path: Path, lines: int) -> str:
    if not path.exists():
        return "(no such file)"
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64 * 1024))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


def stop_all(children: Sequence[Child], grace: float = 5.0) -> None:
    """Stop the children together: SIGTERM to all, then wait for each."""
    for child in children:
        child.signal(signal.SIGTERM)
    deadline = time.monotonic() + grace
    for child in children:
        child.stop(max(0.0, deadline - time.monotonic()))


def free_port() -> int:
    """A port of 127.0.0.1 without a listener, which this process has not returned before."""
    with _allocating:
        for port in random.sample(PORTS, 500):
            if port not in _allocated and _bindable(port):
                _allocated.add(port)
                return port
    raise OSError(f"no free port of 127.0.0.1 in {PORTS.start}-{PORTS.stop}; `ss -ltnp` lists the listeners")


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
    """Call `ready` until its result is true, and return that.

    Connection errors count as not ready. A watched child that exits ends the wait at once.
    """
    deadline, last = time.monotonic() + seconds, "no result yet"
    while True:
        try:
            if result := ready():
                return result
            last = f"last result {result!r}"
        except (OSError, HTTPException) as error:
            last = f"last error {type(error).__name__}: {error}"
        if dead := [child for child in watching if not child.alive]:
            raise TookTooLong(_with_logs(f"{dead[0].name} exited while waiting for: {what} ({last})", dead))
        if time.monotonic() > deadline:
            raise TookTooLong(_with_logs(f"timed out after {seconds:g} s waiting for: {what} ({last})", watching))
        time.sleep(every)


def _with_logs(sentence: str, children: Sequence[Child]) -> str:
    return "\n".join([sentence, *(child.tail() for child in children)])


@contextmanager
def interruptible() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the run as Ctrl-C does, so that all children are stopped and all files removed.

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
