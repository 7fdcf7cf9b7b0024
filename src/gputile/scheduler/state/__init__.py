"""The scheduler's view of the cluster: pods, nodes, agents and usage."""
