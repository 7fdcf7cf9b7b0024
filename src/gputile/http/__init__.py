"""HTTP/1.1: a small server and a small client. This package must not know Kubernetes or the extender API."""
