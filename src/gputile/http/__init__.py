"""HTTP as we need it: bytes in, bytes out. It knows nothing of Kubernetes, and nothing of what is asked."""
