"""Untrusted text: YAML that anybody may have written, and lines that are safe to print on a terminal.

`documents` parses YAML within limits that hold before any value is built (`read_one`, `read_all`); `terminal` escapes
control characters (`shown`, `painted`). The package does no I/O of its own and knows nothing about Kubernetes.
"""
