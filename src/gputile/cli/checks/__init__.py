"""The checks of `gputile doctor`: pure functions from facts of a cluster to findings."""
