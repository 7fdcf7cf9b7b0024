"""The programs of a real node: kubelet, containerd with all it calls, and a busybox to put into an image.

Room:  kubelet and containerd are built from source as the control plane is. runc and a busybox without libraries are
       fetched from Debian's packages and unpacked into the cache: nothing is installed, apt's own lists stay as is.
Door:  `node_programs(tell)`; `Unavailable` says why there are none. `python -m tests.e2e.node_programs` builds them.
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
from tests.e2e.programs import KUBERNETES, Source, Tell, Unavailable, announce, built

CONTAINERD = Source(
    name="containerd",
    module="github.com/containerd/containerd/v2",
    tags=("no_btrfs", "no_devmapper"),  # both need C libraries
)
PACKAGES = ("busybox-static", "runc")


class NodePrograms(msgspec.Struct, frozen=True, kw_only=True):
    """Where the programs are."""

    kubelet: Path
    containerd: Path  # its shim and the network plugins lie beside it
    ctr: Path
    runc: Path
    busybox: Path
    containerd_version: str


def node_programs(tell: Tell = print) -> NodePrograms:
    """All programs, built or fetched now if the cache has them not (containerd: three minutes on two cores)."""
    _check_rights()
    kubernetes, containerd, debian = built(KUBERNETES, tell), built(CONTAINERD, tell), fetched(tell, PACKAGES)
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
    """Whether a machine can be made here at all."""
    if os.geteuid() != 0:
        raise Unavailable("a real node makes namespaces, mounts and cgroups: it needs root")
    if platform.system() != "Linux":
        raise Unavailable(f"a kubelet needs Linux, and this is {platform.system()}")
    for place in OWN.values():
        if cache().resolve().is_relative_to(place):
            raise Unavailable(
                f"a machine hides {place}, and there is the cache: set GPUTILE_E2E_CACHE to another place"
            )


# --- what comes from Debian


def fetched(tell: Tell, packages: Sequence[str]) -> Path:
    """The folder that Debian's packages are unpacked into, fetched now if the cache has it not."""
    release = platform.freedesktop_os_release()
    digest = hashlib.sha256("\0".join(packages).encode()).hexdigest()[:10]
    key = f"{release['ID']}-{release.get('VERSION_ID', 'rolling')}-{platform.machine()}-{digest}"
    waiting = partial(tell, "e2e: another run is building; waiting for it")
    return made_once(key, partial(_fetch, tell, packages), waiting)


def _fetch(tell: Tell, packages: Sequence[str], folder: Path) -> None:
    tell(f"e2e: fetching {' and '.join(packages)} from Debian's packages, once")
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
    """A package that cannot be had, or does not run here, is a reason to skip: it is no fault of ours."""
    if shutil.which(argv[0]) is None:
        raise Unavailable(f"some programs come from Debian's packages, and there is no `{argv[0]}` here")
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["(it said nothing)"])[-1]
        raise Unavailable(f"`{argv[0]}` failed, so Debian's packages cannot be had: {last}")


if __name__ == "__main__":
    announce(node_programs)
