"""How nodes and GPUs are ranked: one row of `table` per policy."""
