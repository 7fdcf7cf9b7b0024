"""TLS of those who serve: contexts made of files, or of certificates in memory.

Door:  `from_files(certificate, key, client_ca)`, `server_context()`; `present(context, pem)` for a key in memory,
       which OpenSSL takes only from files.
"""

import os
import ssl
import tempfile
from collections.abc import Sequence

from gputile.model.errors import InputError


def server_context(protocols: Sequence[str] = ()) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    if protocols:
        context.set_alpn_protocols(list(protocols))
    context.num_tickets = 0  # kube-scheduler never resumes a session; making tickets is a third of a handshake
    return context


def from_files(certificate: str, key: str, client_ca: str = "", *, protocols: Sequence[str] = ()) -> ssl.SSLContext:
    """A client's certificate is asked for where `client_ca` is named, and checked when it is sent. `InputError`."""
    context = server_context(protocols)
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")  # an encrypted key fails instead of asking
        if client_ca:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_OPTIONAL
    except OSError as wrong:  # ssl.SSLError is one, too
        files = ", ".join(file for file in (certificate, key, client_ca) if file)
        raise InputError(f"TLS cannot be set up from {files}: {wrong}; see the settings `tls.*`") from wrong
    return context


def present(context: ssl.SSLContext, pem: bytes) -> None:
    """Certificate and key. Where the system can, the file is one that no disk ever sees: ours may be read-only."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("gputile")
        name, on_disk = f"/proc/self/fd/{descriptor}", ""
    else:
        descriptor, name = tempfile.mkstemp(prefix="gputile-")
        on_disk = name
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(pem)
            file.flush()
            context.load_cert_chain(name, password=lambda: "")  # an encrypted key fails instead of asking
    finally:
        if on_disk:
            os.unlink(on_disk)
