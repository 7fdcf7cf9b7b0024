"""Simulation: a cluster in memory, scheduled by the production core, and replays of pod lists.

`manifests.load` parses YAML into workloads, `cluster.MemoryCluster.submit` schedules them, `replay` and `steady_state`
run whole lists. Nothing here uses the network or a real cluster.
"""
