"""Fixtures of the end-to-end tests, which run only on request.

A request is `make e2e`, `GPUTILE_E2E=1`, or this folder on pytest's command line. Where the programs cannot
be built every test is skipped with the reason; with `GPUTILE_E2E_MUST_RUN=1` (CI) it fails instead.
"""

import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.e2e import node_programs as building_nodes
from tests.e2e import programs as building
from tests.e2e.api import Kube
from tests.e2e.control_plane import ControlPlane
from tests.e2e.folders import cache, run_folder
from tests.e2e.node_programs import CONTAINERD, NodePrograms
from tests.e2e.programs import ETCD, KUBERNETES, Programs, Report, Unavailable

T = TypeVar("T")
HERE = Path(__file__).parent
WANTED, MUST_RUN = "GPUTILE_E2E", "GPUTILE_E2E_MUST_RUN"
SECONDS = 300  # for one test, without its fixtures: the first of them builds Kubernetes


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if _is_requested(config) else True


def _is_requested(config: pytest.Config) -> bool:
    named = (Path(config.invocation_params.dir, word.partition("::")[0]).resolve() for word in config.args)
    return os.environ.get(WANTED) == "1" or any(path == HERE or HERE in path.parents for path in named)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """pytest calls this hook only if this folder was named."""
    sources = (KUBERNETES, ETCD, CONTAINERD)
    is_built = all((cache() / source.key).is_dir() for source in sources)
    state = "built already" if is_built else "to be built first, about 12 minutes on two cores"
    versions = ", ".join(f"{source.name} {source.version}" for source in sources)
    return [f"e2e: {versions}, {state}; cache {cache()}"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SECONDS, func_only=True))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A failed test shows the end of each program's log: their folder is gone after the run."""
    report = yield
    if report.failed:
        planes = [it for it in getattr(item, "funcargs", {}).values() if isinstance(it, ControlPlane)]
        report.sections += [(f"logs in {plane.folder}", plane.tails()) for plane in planes[:1]]
    return report


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Replaces pytest's fixture, whose folders stay in the temporary directory; this one is removed after the test."""
    with run_folder() as folder:
        (folder / "tmp").mkdir()
        yield folder / "tmp"


@pytest.fixture(scope="session")
def programs(pytestconfig: pytest.Config) -> Programs:
    """The programs of the control plane, built now if necessary, with progress on the terminal."""
    return _built_or_skipped(pytestconfig, building.programs)


@pytest.fixture(scope="session")
def node_programs(pytestconfig: pytest.Config) -> NodePrograms:
    """The programs of a `Machine`; the test is skipped where a machine cannot run."""
    return _built_or_skipped(pytestconfig, building_nodes.node_programs)


def _built_or_skipped(config: pytest.Config, build: Callable[[Report], T]) -> T:
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    try:
        with capture.global_and_fixture_disabled():
            return build(lambda line: print(f"\n{line}", end="", flush=True))
    except Unavailable as error:
        reason = str(error)
    if os.environ.get(MUST_RUN) == "1":
        pytest.fail(f"e2e must run here ({MUST_RUN}=1) and cannot: {reason}", pytrace=False)
    pytest.skip(f"e2e: {reason}")


@pytest.fixture(scope="session")
def control_plane(programs: Programs) -> Iterator[ControlPlane]:
    """One etcd and API server for the whole session, without scheduler, controllers or nodes."""
    with ControlPlane(programs) as plane:
        yield plane


@pytest.fixture
def plane(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    """The session's control plane; its pods and nodes are removed after the test."""
    yield control_plane
    control_plane.clear()


@pytest.fixture
def kube(plane: ControlPlane) -> Kube:
    """A client with the admin's token."""
    return plane.kube
