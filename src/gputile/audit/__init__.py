"""The auditor: proves from pods and nodes alone that no GPU is double-allocated.

It parses pods, records and GPU sizes with its own code and does its own sums: it shares no code with the dialects, the
ledger or the engine, so that it does not repeat their defects. The API is `audit.audit`: JSON objects in, a report out.
"""
