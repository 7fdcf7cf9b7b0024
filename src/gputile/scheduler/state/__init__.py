"""What the scheduler knows of the cluster: pods, nodes, agents, usage."""
