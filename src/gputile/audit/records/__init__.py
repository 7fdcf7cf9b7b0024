"""Records on pods of the GPUs they hold, written by other systems and by our own scheduler: one reader per family.

A reader turns its annotations into a `Record`, or into an `InvalidRecord` that says why, or returns None when there is
no record. Readers must not depend on each other.
"""
