"""The auditor: proves from pods and nodes alone that no GPU is double-allocated.

It reads pods, records and GPU sizes by itself and does its own sums: it shares no code with the dialects, the ledger or
the engine, so that a defect of theirs is not repeated here. `checking.audit` is the API; JSON objects in, a report out.
"""
