"""The names of the placement policies, as pods and settings write them. `engine.policies.table` has a row for each."""

POLICY_NAMES = ("binpack", "spread", "random", "topology", "fragmentation", "tiling")
DEFAULT_POLICY = "tiling"
