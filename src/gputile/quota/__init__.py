"""Quota by namespace and GPU model: documents, arithmetic, the constraint on a request, and usage. Pure; the watcher is
in `scheduler`."""
