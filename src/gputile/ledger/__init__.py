"""The ledger: which pod holds which tile of which card.

It is the only mutable state of the decision core. It runs in one thread, does no I/O and reads no clock.
`Ledger.handle(event)` changes it, `Ledger.fleet` answers queries, `Ledger.check()` audits it.
"""
