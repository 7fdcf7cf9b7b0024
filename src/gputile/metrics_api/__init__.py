"""The aggregated metrics API: the GPUs of nodes and pods, served as Kubernetes objects through the API server.

It is read-only, with list, get and watch, behind the API server's front proxy. `projection` keeps the objects,
`watch_cache` their history, `server` answers requests, and `app` puts it all together.
"""
