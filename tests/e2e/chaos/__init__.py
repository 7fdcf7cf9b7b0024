"""Chaos on the real control plane: a storm of pods during faults, and the checks after each fault.

`proxy` breaks the connection of gputile to the API server, `faults` breaks processes, `storm` creates and deletes pods,
`truth` has the checks, `campaign` runs them together. `make chaos` runs it for any time.
"""
