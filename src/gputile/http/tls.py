"""TLS contexts for servers, made from files, or from a certificate in memory (`present`: OpenSSL reads only files)."""

import os
import ssl
import tempfile

from gputile.model.errors import InputError


def server_context() -> ssl.SSLContext:
    """A server's context without a certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    context.num_tickets = 0  # kube-scheduler never resumes a session; making tickets is a third of a handshake
    return context


def from_files(certificate: str, key: str, client_ca: str = "") -> ssl.SSLContext:
    """With `client_ca`, a client certificate is requested, and verified if it is sent. Raises `InputError`."""
    context = server_context()
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")  # an encrypted key fails instead of prompting
        if client_ca:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_OPTIONAL
    except OSError as error:  # ssl.SSLError is an OSError
        files = ", ".join(file for file in (certificate, key, client_ca) if file)
        raise InputError(f"TLS cannot be set up from {files}: {error}; check the settings `tls.*`") from error
    return context


def present(context: ssl.SSLContext, pem: bytes) -> None:
    """Load a certificate and key from memory, through a memfd where possible: the file system may be read-only."""
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
            context.load_cert_chain(name, password=lambda: "")  # an encrypted key fails instead of prompting
    finally:
        if on_disk:
            os.unlink(on_disk)
