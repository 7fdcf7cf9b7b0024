"""Pure decisions: what fits, which is best, why not, who would have to go.

Room:  functions of values, and the fleet's arrays; no clock, no dice, no I/O.
Door:  `placing.place` defines what fits on one node; `fleet.Fleet` answers the same for all nodes at once;
       `explaining.explain`, `preempting.victims` and `quota` build on the two.
"""
