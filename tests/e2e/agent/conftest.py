"""Fixtures: one site for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.e2e.agent import site as sites
from tests.e2e.agent.site import Site
from tests.e2e.node_programs import NodePrograms
from tests.e2e.programs import Programs


@pytest.fixture(scope="package")
def site(programs: Programs, node_programs: NodePrograms) -> Iterator[Site]:
    with sites.site(programs) as site:
        yield site


@pytest.fixture
def space(site: Site) -> Iterator[str]:
    """A namespace for one test."""
    namespace = site.space()
    yield namespace
    site.clear(namespace)
