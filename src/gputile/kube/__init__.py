"""The API server: who we are to it, how we follow what it holds, and the few things we write.

Room:  `values` (what comes out and goes in), `auth`, `client`, `following`, `lease`; `memory` needs no server.
Door:  the Protocol `values.Api`; `client.Client` is the real one.
"""
