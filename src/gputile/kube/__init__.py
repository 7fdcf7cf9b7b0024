"""The API server: authentication, a client, watches, leader election. This package must not make scheduling decisions.

The Protocol `api.Api` is the interface; `client.Client` implements it over HTTP and `fake.MemoryApi` without a server.
"""
