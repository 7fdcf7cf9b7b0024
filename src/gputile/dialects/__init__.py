"""Seven dialects: pod and node JSON on one side, gputile's own values on the other.

Only this package knows resource names, annotation keys, units and encodings; it does no I/O. Its API is `registry`
(`read_pod`, `write_grant`, `read_node`) and `records` (`read_grant`). Each dialect has one module with the same
functions; `kube_objects` has the Kubernetes objects, `parsing` the parsers, `selectors` the shared annotations.
"""
