"""Pod and node JSON of seven families on one side, our values on the other.

Room:  the only place that knows resource names, annotation keys, units and encodings; no I/O.
Door:  `speaking.read_pod`, `speaking.write_grant`, `speaking.read_grant`, `speaking.read_node`. Each family has one
       file with the same four verbs; `wire` has the Kubernetes objects, `selecting` the annotations that they share.
"""
