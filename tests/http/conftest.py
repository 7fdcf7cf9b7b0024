"""Tests with sockets run on both event loops: uvloop's in the scheduler, asyncio's where there is no uvloop."""

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

ON_BOTH = ("test_client.py", "test_client_tls.py")


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    plain = {"asyncio": asyncio.new_event_loop}
    return plain | {"uvloop": uvloop.new_event_loop} if item.path.name in ON_BOTH else plain
