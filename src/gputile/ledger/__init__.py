"""Who holds which tile of which card.

Room:  the only mutable state of the decision core; one thread, no I/O, no clock.
Door:  `Ledger.handle(event)` to change it, `Ledger.fleet` to ask it, `Ledger.check()` to audit it.
"""
