"""Builds the programs of a real node: kubelet, containerd with its helpers, and a busybox for the image.

kubelet and containerd are built from source as the control plane is. runc and a static busybox come from Debian's
packages and are unpacked into the cache; nothing is installed, and apt's own lists are not changed.
`python -m tests.e2e.node_programs` builds them.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from tests.e2e.disks import OWN
from tests.e2e.folders import cache, made_once
from tests.e2e.programs import KUBERNETES, Report, Source, Unavailable, announce, built

CONTAINERD = Source(
    name="containerd",
    module="github.com/containerd/containerd/v2",
    tags=("no_btrfs", "no_devmapper"),  # both need C libraries
)
PACKAGES = ("busybox-static", "runc")


class NodePrograms(msgspec.Struct, frozen=True, kw_only=True):
    """Where the programs are."""

    kubelet: Path
    containerd: Path  # its shim and the network plugins are in the same folder
    ctr: Path
    runc: Path
    busybox: Path
    containerd_version: str


def node_programs(report: Report = print) -> NodePrograms:
    """All programs, built or fetched now if they are not cached (containerd: three minutes on two cores)."""
    _check_rights()
    kubernetes, containerd, debian = built(KUBERNETES, report), built(CONTAINERD, report), fetched(report, PACKAGES)
    _run([str(debian / "usr" / "sbin" / "runc"), "--version"], debian)
    return NodePrograms(
        kubelet=kubernetes / "kubelet",
        containerd=containerd / "containerd",
        ctr=containerd / "ctr",
        runc=debian / "usr" / "sbin" / "runc",
        busybox=debian / "bin" / "busybox",
        containerd_version=CONTAINERD.version,
    )


def _check_rights() -> None:
    """Raise `Unavailable` unless a machine can run here."""
    if os.geteuid() != 0:
        raise Unavailable("a real node creates namespaces, mounts and cgroups: run as root")
    if platform.system() != "Linux":
        raise Unavailable(f"a kubelet needs Linux, and this is {platform.system()}")
    for place in OWN.values():
        if cache().resolve().is_relative_to(place):
            raise Unavailable(
                f"the cache is in {place}, which a machine mounts over: set GPUTILE_E2E_CACHE to another folder"
            )


# --- Debian's packages


def fetched(report: Report, packages: Sequence[str]) -> Path:
    """The folder with the unpacked Debian packages, fetched now if it is not cached."""
    release = platform.freedesktop_os_release()
    digest = hashlib.sha256("\0".join(packages).encode()).hexdigest()[:10]
    key = f"{release['ID']}-{release.get('VERSION_ID', 'rolling')}-{platform.machine()}-{digest}"
    waiting = partial(report, "e2e: another run is building; waiting for it")
    return made_once(key, partial(_fetch, report, packages), waiting)


def _fetch(report: Report, packages: Sequence[str], folder: Path) -> None:
    report(f"e2e: fetching {' and '.join(packages)} from Debian's packages, once")
    with tempfile.TemporaryDirectory(dir=folder) as name:
        work = Path(name)
        for needed in ("lists/partial", "cache/archives/partial"):
            (work / needed).mkdir(parents=True)
        own = (f"Dir::State::Lists={work / 'lists'}", f"Dir::Cache={work / 'cache'}", "APT::Sandbox::User=root")
        options = [word for option in own for word in ("-o", option)]
        _run(["apt-get", *options, "--quiet", "update"], work)
        _run(["apt-get", *options, "--quiet", "download", *packages], work)
        for package in sorted(work.glob("*.deb")):
            _run(["dpkg-deb", "--extract", str(package), str(folder)], work)


def _run(argv: Sequence[str], cwd: Path) -> None:
    """Raise `Unavailable`, which skips the tests, for a package that cannot be fetched or does not run here."""
    if shutil.which(argv[0]) is None:
        raise Unavailable(f"some programs come from Debian's packages, and `{argv[0]}` is not installed")
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["(no output)"])[-1]
        raise Unavailable(f"`{argv[0]}` failed, so Debian's packages cannot be fetched: {last}")


if __name__ == "__main__":
    announce(node_programs)
