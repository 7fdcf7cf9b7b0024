"""Builders of values and Kubernetes objects with sensible defaults, for tests and benches: `node()`, `ask()`, `pod()`.

The package is public. Services never import it.
"""
