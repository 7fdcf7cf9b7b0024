"""How hard the property tests try. `make test EFFORT=20` tries twenty times as many examples."""

import os

from hypothesis import settings

EFFORT = int(os.environ.get("EFFORT", "1"))


def examples(count: int) -> settings:
    return settings(max_examples=count * EFFORT)
