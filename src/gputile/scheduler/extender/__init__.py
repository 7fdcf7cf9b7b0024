"""The verbs that kube-scheduler calls, over HTTP: filter, prioritize, dry run, and the older systems' paths."""
