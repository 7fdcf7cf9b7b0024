"""Values with units, and the words of the program. No behaviour beyond arithmetic on themselves.

Room:  what every other room may know: cards, requests, grants, refusals, errors.
Door:  import the value you need from its file; nothing here imports from another room.
"""
