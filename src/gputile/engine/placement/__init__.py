"""One pod on one node: `place` defines what fits."""
