"""The files of the end-to-end tests: one cache outside the checkout, with one folder per run.

A run's folder is locked while its process lives. The next run removes what a killed run left behind.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

KEEP = "GPUTILE_E2E_KEEP"


def cache(environ: Mapping[str, str] = os.environ) -> Path:
    """`$GPUTILE_E2E_CACHE`, else `$XDG_CACHE_HOME/gputile/e2e`, else `~/.cache/gputile/e2e`; made if missing."""
    named = environ.get("GPUTILE_E2E_CACHE")
    root = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(named).expanduser().absolute() if named else Path(root) / "gputile" / "e2e"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def locked(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the file lock at `path`; `waiting` is called once if another process holds it. Ends with the process."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def made_once(key: str, make: Callable[[Path], None], waiting: Callable[[], None] = lambda: None) -> Path:
    """The folder `key` of the cache, filled by `make(folder)` if it is not there yet.

    It is filled under another name and renamed when it is whole: an interrupted `make` leaves nothing half done.
    """
    ready, building = cache() / key, cache() / f"building-{key}"
    if ready.is_dir():
        return ready
    with locked(cache() / "build.lock", waiting):
        if not ready.is_dir():
            _sweep_unfinished()
            building.mkdir()
            try:
                make(building)
                building.rename(ready)
            finally:
                shutil.rmtree(building, ignore_errors=True)
    return ready


def _sweep_unfinished() -> None:
    """Called under the lock: every folder that is still named building-* belongs to an interrupted build."""
    for left in cache().glob("building-*"):
        shutil.rmtree(left, ignore_errors=True)


@contextmanager
def run_folder() -> Iterator[Path]:
    """A fresh folder for one run, removed at the end unless `GPUTILE_E2E_KEEP=1`."""
    runs = cache() / "runs"
    with locked(cache() / "runs.lock"):  # so that no run sweeps a folder between its creation and its locking
        runs.mkdir(exist_ok=True)
        _sweep(runs)
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=runs))
        owner = (folder / "owner").open("w")
        fcntl.flock(owner, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        if os.environ.get(KEEP) == "1":
            (folder / "kept").touch()
            print(f"\ne2e: {KEEP}=1, so the run's folder is kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
        owner.close()


def _sweep(runs: Path) -> None:
    """Remove the folders whose process is gone."""
    for folder in runs.iterdir():
        if not (folder / "kept").exists() and not owned(folder):
            shutil.rmtree(folder, ignore_errors=True)


def owned(folder: Path) -> bool:
    """Whether the run of this folder still lives."""
    with suppress(FileNotFoundError), (folder / "owner").open() as owner:
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
