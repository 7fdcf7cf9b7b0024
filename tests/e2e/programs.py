"""Builds the programs of Kubernetes once from source, and caches them outside the checkout.

Only the `tool` lines of tools/*/go.mod name the programs, and only their `require` lines name the versions. An
interrupted build must leave nothing in the cache. `python -m tests.e2e.programs` builds them and prints their paths.
"""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from tests.e2e.folders import cache, made_once
from tests.e2e.processes import Child, interruptible, last_lines

TOOLS = Path(__file__).parent / "tools"
BROKEN_LOCK = ("checksum mismatch", "SECURITY ERROR", "missing go.sum entry", "updates to go.mod needed")
GIB = 1024**3
NEEDS = 5 * GIB  # of disk for the first build: Go's caches of modules (1 GB) and of compiled packages (3 GB), programs

Report = Callable[[str], None]  # of progress, line by line


class Unavailable(Exception):
    """This machine cannot build the programs: no Go, too old a Go, no modules."""


class BuildFailed(Exception):
    """The build failed on a machine that meets its requirements: an error, not a reason to skip."""


class Programs(msgspec.Struct, frozen=True, kw_only=True):
    """Where the programs are."""

    etcd: Path
    kube_apiserver: Path
    kube_controller_manager: Path
    kube_scheduler: Path
    kubectl: Path
    kubernetes: str  # its version, e.g. v1.36.4
    etcd_version: str


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """One go.mod with tools, and how its build differs from another's."""

    name: str
    module: str  # whose version is the version of the programs
    rename: Mapping[str, str] = {}
    tags: Sequence[str] = ()  # of the build: parts to leave out

    @property
    def folder(self) -> Path:
        return TOOLS / self.name

    @property
    def version(self) -> str:
        match = re.search(rf"^\s*(?:require )?{re.escape(self.module)} (v\S+)", self._text("go.mod"), re.MULTILINE)
        if not match:
            raise BuildFailed(f"{self.folder / 'go.mod'} does not require {self.module}; add the line")
        return match[1]

    @property
    def flags(self) -> list[str]:
        """How to link: with its version, else the programs call themselves v0.0.0 and version checks fail."""
        major, minor, _ = self.version.removeprefix("v").split(".", 2)
        values = {"gitVersion": self.version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
        variables = " ".join(f"-X k8s.io/component-base/version.{name}={value}" for name, value in values.items())
        return [*self.choice, "-trimpath", "-buildvcs=false", "-ldflags", f"-s -w {variables}"]

    @property
    def choice(self) -> list[str]:
        """Which files are compiled."""
        return ["-tags", ",".join(self.tags)] if self.tags else []

    @property
    def key(self) -> str:
        """The name in the cache: another version, lock file, flag or machine is another folder."""
        parts = (self._text("go.mod"), self._text("go.sum"), *self.flags)
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:10]
        return f"{self.name}-{self.version}-{platform.machine()}-{digest}"

    def _text(self, file: str) -> str:
        return (self.folder / file).read_text()


KUBERNETES = Source(name="kubernetes", module="k8s.io/kubernetes")
ETCD = Source(name="etcd", module="go.etcd.io/etcd/server/v3", rename={"server": "etcd", "v3": "etcd"})


def programs(report: Report = print) -> Programs:
    """All programs, built now if they are not cached (about 8 minutes on two cores)."""
    etcd, kubernetes = built(ETCD, report), built(KUBERNETES, report)
    return Programs(
        etcd=etcd / "etcd",
        kube_apiserver=kubernetes / "kube-apiserver",
        kube_controller_manager=kubernetes / "kube-controller-manager",
        kube_scheduler=kubernetes / "kube-scheduler",
        kubectl=kubernetes / "kubectl",
        kubernetes=KUBERNETES.version,
        etcd_version=ETCD.version,
    )


def built(source: Source, report: Report) -> Path:
    """The folder with the programs of `source`, built now if they are not cached."""
    waiting = partial(report, "e2e: another run is building; waiting for it")
    return made_once(source.key, partial(_build, source, report), waiting)


def _build(source: Source, report: Report, building: Path) -> None:
    go, ready = _go(source), cache() / source.key
    free = shutil.disk_usage(cache()).free
    report(f"e2e: building {source.name} {source.version} into {ready}, once ({free / GIB:.0f} GB of disk are free)")
    if free < NEEDS:
        report(f"e2e: a first build takes about {NEEDS / GIB:.0f} GB, most of it in Go's own caches: it may not fit")
    total, log = _packages(go, source, report), cache() / f"{source.key}.log"
    began = time.monotonic()
    log.unlink(missing_ok=True)
    argv = [go, "build", "-v", "-o", f"{building}/", *source.flags, "tool"]
    _run(Child(f"go build of {source.name}", argv, log, _go_env(), source.folder), total, report)
    for old, new in source.rename.items():
        if (building / old).exists():
            (building / old).rename(building / new)
    log.unlink()
    size = sum(file.stat().st_size for file in building.iterdir()) / 1e6
    report(f"e2e: built {source.name} {source.version} in {_clock(began)}: {size:.0f} MB in {ready}")


def _run(build: Child, total: int, report: Report) -> None:
    """Run the build and report its progress every 15 s; it dies with this process and on Ctrl-C."""
    began = reported = time.monotonic()
    with interruptible():
        try:
            build.start()
            while build.alive:
                time.sleep(0.2)
                if time.monotonic() - reported > 15:
                    reported = time.monotonic()
                    report(f"e2e: {_clock(began)}  {build.name}: {_progress(build.log, total)}")
        finally:
            build.stop(grace=2)
    if build.status != 0:
        raise BuildFailed(f"{build.name} failed. Its log: {build.log}\n{last_lines(build.log, 20)}")


def _progress(log: Path, total: int) -> str:
    """`go build -v` prints each package when its compilation starts; cached packages are not printed."""
    names = log.read_text(errors="replace").splitlines()
    return f"{len(names)} packages of at most {total}, now {names[-1]}" if names else "reading Go's cache, linking"


def _packages(go: str, source: Source, report: Report) -> int:
    """The number of packages to build. Go fetches the modules first, so a missing network fails here."""
    report(f"e2e: fetching the Go modules of {source.name} (if they are not in Go's module cache)")
    listed = _run_go(go, "list", "-deps", *source.choice, "tool", cwd=source.folder)
    if listed.returncode == 0:
        return len(listed.stdout.splitlines())
    last = (listed.stderr.strip().splitlines() or ["(no output)"])[-1]
    if any(sign in listed.stderr for sign in BROKEN_LOCK):
        raise BuildFailed(f"{source.folder / 'go.mod'} and go.sum do not agree: {last}. Run `go mod tidy` there")
    proxy = _run_go(go, "env", "GOPROXY", cwd=source.folder).stdout.strip()
    raise Unavailable(f"the Go modules of {source.name} cannot be fetched ({last}); is GOPROXY={proxy} reachable?")


def _go(source: Source) -> str:
    """The path of the Go command; `Unavailable` if there is none, or if it is too old for `source`."""
    go = shutil.which("go")
    if go is None:
        raise Unavailable("Go is not installed (no `go` on PATH), and Kubernetes is built from source; see go.dev/dl")
    done = _run_go(go, "version", cwd=source.folder)  # in that folder Go compares itself with the go.mod
    if done.returncode:
        raise Unavailable(f"this Go cannot build {source.name}: {done.stderr.strip()}; install a newer one, go.dev/dl")
    return go


def _run_go(go: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([go, *words], cwd=cwd, env=_go_env(), capture_output=True, text=True, check=False)


def _go_env() -> dict[str, str]:
    """Static programs, and a go.mod that is read and never written."""
    kept = os.environ.get("GOFLAGS", "").split()
    flags = " ".join([*(flag for flag in kept if not flag.startswith("-mod=")), "-mod=readonly"])
    return {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": flags, "GOWORK": "off"}


def _clock(since: float) -> str:
    minutes, seconds = divmod(int(time.monotonic() - since), 60)
    return f"{minutes}:{seconds:02d}"


def announce(build: Callable[[Report], msgspec.Struct]) -> None:
    """Build from a terminal: print the progress, then the paths."""
    try:
        built_programs = build(lambda line: print(line, flush=True))
    except (Unavailable, BuildFailed) as reason:
        sys.exit(f"e2e: {reason}")
    print("\n".join(str(path) for path in msgspec.structs.astuple(built_programs) if isinstance(path, Path)))


if __name__ == "__main__":
    announce(programs)
