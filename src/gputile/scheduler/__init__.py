"""The scheduler process: what kube-scheduler asks, answered from a book that follows the cluster.

Room:  `cluster_state` keeps the book true, `verbs` decides, `binding` writes, `granting` books pods that came around
       us,
       `waiting` tells those that wait why, `leading` says who may write, `server` speaks HTTP, `process` starts it all.
Door:  `process.Process`.
"""
