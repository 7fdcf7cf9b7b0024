"""A cluster in memory, run by the real decision core; and manifests read from files.

Room:  everything here works without a cluster: the demo, and later replays. It never touches a network.
Door:  `manifests.load` turns YAML into workloads, `cluster.MemoryCluster.submit` schedules them.
"""
