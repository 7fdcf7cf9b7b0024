"""Certificates that are in memory, for OpenSSL, which takes keys only from files.

Door:  `present(context, pem)`.
"""

import os
import ssl
import tempfile


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
