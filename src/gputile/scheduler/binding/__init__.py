"""Pods get their grants: by the bind verb, and after they were bound by another scheduler."""
