"""The values that all packages share: cards, requests, grants, refusals, errors, and their units.

Values do arithmetic on themselves and nothing else. This package imports no other package of gputile.
"""
