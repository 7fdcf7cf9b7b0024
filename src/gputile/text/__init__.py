"""Text from strangers and for people: YAML that anybody may have written, and lines that a terminal is safe with.

Room:  `documents` (YAML to values, bounded before anything is built), `terminal` (what may reach a terminal).
Door:  `documents.read_one`, `documents.read_all`; `terminal.shown`, `terminal.painted`.
"""
