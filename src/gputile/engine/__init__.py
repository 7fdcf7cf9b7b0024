"""Pure decisions: which nodes fit, which is best, why the others do not fit, and which pods to evict.

Functions of values and the arrays of the fleet; no clock, no randomness, no I/O. `placement.place.place` defines what
fits on one node. `fleet.fleet.Fleet` answers the same for all nodes at once. `explanation` and `victims` build on the
two.
"""
