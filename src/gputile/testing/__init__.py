"""Builders that make clusters in one breath; public, for our tests, benches and yours.

Room:  values and Kubernetes objects with sensible defaults. Services never import it.
Door:  `node(...)`, `ask(...)`, `pod(...)`.
"""
