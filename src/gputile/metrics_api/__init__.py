"""The aggregated metrics API: what runs on which card, told through the Kubernetes API server.

Room:  read-only views of the mirror as Kubernetes objects, with list, get and watch, behind the API server's front
       proxy. `window` keeps the objects, `collection` their history, `server` answers; the rest are its parts.
Door:  `MetricsApi` in `serving`.
"""
