"""The scheduler process: a kube-scheduler extender whose answers come from a ledger that follows the cluster.

`state` keeps the ledger up to date from watches, `extender` answers filter and prioritize, `binding` writes grants,
`preemption` evicts, and `pending` explains pending pods in Events. `leadership` decides which replica may write. `app`
starts and stops all of it.
"""
