"""Chaos on the real control plane: a storm of pods while things break, and what must hold after each fault.

`proxy` breaks what our process hears from the API server, `faults` breaks processes, `storm` makes and removes pods,
`truth` says what must hold, `campaign` puts them together. `make chaos` runs it for as long as one wants.
"""
