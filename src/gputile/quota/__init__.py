"""Quota by namespace and GPU model: limits, documents, arithmetic, the constraint on a request, and usage.

All of it is pure; `scheduler.quota_watcher` watches the ConfigMaps.
"""
