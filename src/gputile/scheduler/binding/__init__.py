"""Grants for pods: by the bind verb, and by the reconciler for pods that another scheduler bound."""
