"""What other systems and our own scheduler wrote on a pod about the GPUs it holds: one reader per family.

A reader turns its annotations into a `Record`, says in a sentence why it does not believe them (`Disbelief`), or
returns None when there is no record. Readers know nothing of each other and nothing of requests.
"""
