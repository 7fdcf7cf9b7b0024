"""The auditor: proves from pods and nodes alone that no card is sold twice.

It reads what a cluster says through `dialects`, and does its own sums: it shares no code with the book or the engine,
so that a slip of theirs is not made here again. `checking.audit` is the door; values in, a report out.
"""
