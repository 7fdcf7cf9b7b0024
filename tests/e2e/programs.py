"""The programs of Kubernetes, built once from source and kept outside the checkout.

Room:  the `tool` lines of tools/*/go.mod name them, and their `require` lines the versions; nothing else does.
       A build happens in a folder of its own that is renamed at the end: an interrupted one leaves nothing half done.
Door:  `programs(tell)`; `Unavailable` says why there are none. `python -m tests.e2e.programs` builds and prints them.
       `built(source, tell)` for other sources: those of a node are in node_programs.py.
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

Tell = Callable[[str], None]


class Unavailable(Exception):
    """This machine cannot build the programs: no Go, too old a Go, no modules."""


class BuildFailed(Exception):
    """The programs could have been built here and were not: this is a fault, not a reason to skip."""


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
        found = re.search(rf"^\s*(?:require )?{re.escape(self.module)} (v\S+)", self._text("go.mod"), re.MULTILINE)
        if not found:
            raise BuildFailed(f"{self.folder / 'go.mod'} does not require {self.module}; add the line")
        return found[1]

    @property
    def flags(self) -> list[str]:
        """How to link: with its version, else the programs call themselves v0.0.0 and version checks fail."""
        major, minor, _ = self.version.removeprefix("v").split(".", 2)
        said = {"gitVersion": self.version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
        marks = " ".join(f"-X k8s.io/component-base/version.{name}={value}" for name, value in said.items())
        return [*self.choice, "-trimpath", "-buildvcs=false", "-ldflags", f"-s -w {marks}"]

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


def programs(tell: Tell = print) -> Programs:
    """All programs, built now if the cache has them not (about 8 minutes on two cores)."""
    etcd, kubernetes = built(ETCD, tell), built(KUBERNETES, tell)
    return Programs(
        etcd=etcd / "etcd",
        kube_apiserver=kubernetes / "kube-apiserver",
        kube_controller_manager=kubernetes / "kube-controller-manager",
        kube_scheduler=kubernetes / "kube-scheduler",
        kubectl=kubernetes / "kubectl",
        kubernetes=KUBERNETES.version,
        etcd_version=ETCD.version,
    )


def built(source: Source, tell: Tell) -> Path:
    """The folder with the programs of `source`, built now if the cache has them not."""
    waiting = partial(tell, "e2e: another run is building; waiting for it")
    return made_once(source.key, partial(_build, source, tell), waiting)


def _build(source: Source, tell: Tell, building: Path) -> None:
    go, ready = _go(source), cache() / source.key
    free = shutil.disk_usage(cache()).free
    tell(f"e2e: building {source.name} {source.version} into {ready}, once ({free / GIB:.0f} GB of disk are free)")
    if free < NEEDS:
        tell(f"e2e: a first build takes about {NEEDS / GIB:.0f} GB, most of it in Go's own caches: it may not fit")
    total, log = _packages(go, source, tell), cache() / f"{source.key}.log"
    began = time.monotonic()
    log.unlink(missing_ok=True)
    argv = [go, "build", "-v", "-o", f"{building}/", *source.flags, "tool"]
    _run(Child(f"go build of {source.name}", argv, log, _go_env(), source.folder), total, tell)
    for old, new in source.rename.items():
        if (building / old).exists():
            (building / old).rename(building / new)
    log.unlink()
    size = sum(file.stat().st_size for file in building.iterdir()) / 1e6
    tell(f"e2e: built {source.name} {source.version} in {_clock(began)}: {size:.0f} MB in {ready}")


def _run(build: Child, total: int, tell: Tell) -> None:
    """Run the build to its end and show how far it is every 15 s; it dies with us and on Ctrl-C."""
    began = told = time.monotonic()
    with interruptible():
        try:
            build.start()
            while build.alive:
                time.sleep(0.2)
                if time.monotonic() - told > 15:
                    told = time.monotonic()
                    tell(f"e2e: {_clock(began)}  {build.name}: {_progress(build.log, total)}")
        finally:
            build.stop(grace=2)
    if build.status != 0:
        raise BuildFailed(f"{build.name} failed. Its log: {build.log}\n{last_lines(build.log, 20)}")


def _progress(log: Path, total: int) -> str:
    """`go build -v` names each package as its compiling starts; those that Go's cache has are not named."""
    names = log.read_text(errors="replace").splitlines()
    return f"{len(names)} packages of at most {total}, now {names[-1]}" if names else "reading Go's cache, linking"


def _packages(go: str, source: Source, tell: Tell) -> int:
    """How many packages the programs are made of. To know, Go fetches the modules, so a missing network shows here."""
    tell(f"e2e: fetching the Go modules of {source.name} (if Go's module cache has them not)")
    listed = _ask(go, "list", "-deps", *source.choice, "tool", cwd=source.folder)
    if listed.returncode == 0:
        return len(listed.stdout.splitlines())
    last = (listed.stderr.strip().splitlines() or ["(Go said nothing)"])[-1]
    if any(sign in listed.stderr for sign in BROKEN_LOCK):
        raise BuildFailed(f"{source.folder / 'go.mod'} and go.sum do not agree: {last}. Run `go mod tidy` there")
    proxy = _ask(go, "env", "GOPROXY", cwd=source.folder).stdout.strip()
    raise Unavailable(f"the Go modules of {source.name} cannot be fetched ({last}); is GOPROXY={proxy} reachable?")


def _go(source: Source) -> str:
    """The Go command, if there is one and it is new enough for `source`."""
    go = shutil.which("go")
    if go is None:
        raise Unavailable("Go is not installed (no `go` on PATH), and Kubernetes is built from source; see go.dev/dl")
    said = _ask(go, "version", cwd=source.folder)  # in that folder Go compares itself with the go.mod
    if said.returncode:
        raise Unavailable(f"this Go cannot build {source.name}: {said.stderr.strip()}; install a newer one, go.dev/dl")
    return go


def _ask(go: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([go, *words], cwd=cwd, env=_go_env(), capture_output=True, text=True, check=False)


def _go_env() -> dict[str, str]:
    """Static programs, and a go.mod that is read and never written."""
    kept = os.environ.get("GOFLAGS", "").split()
    flags = " ".join([*(flag for flag in kept if not flag.startswith("-mod=")), "-mod=readonly"])
    return {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": flags, "GOWORK": "off"}


def _clock(since: float) -> str:
    minutes, seconds = divmod(int(time.monotonic() - since), 60)
    return f"{minutes}:{seconds:02d}"


def announce(build: Callable[[Tell], msgspec.Struct]) -> None:
    """Build from a terminal: progress as it comes, then the paths."""
    try:
        made = build(lambda line: print(line, flush=True))
    except (Unavailable, BuildFailed) as reason:
        sys.exit(f"e2e: {reason}")
    print("\n".join(str(path) for path in msgspec.structs.astuple(made) if isinstance(path, Path)))


if __name__ == "__main__":
    announce(programs)
