"""Throw-away certificates: a CA for the test, servers and clients signed by it, ServiceAccount keys.

All files are in one folder of the run; nothing outside it trusts them.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFE = timedelta(days=1)


class Pair(msgspec.Struct, frozen=True):
    """Two PEM files: a certificate (or, for ServiceAccounts, the public key) and its private key."""

    cert: Path
    key: Path


class Authority:
    """A certificate authority for one run."""

    def __init__(self, folder: Path, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._folder, self._cert, self._key = folder, cert, key
        self.ca = folder / "ca.crt"

    @classmethod
    def create(cls, folder: Path, name: str = "gputile e2e") -> "Authority":
        """A new authority with its files in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        key, subject = ec.generate_private_key(ec.SECP256R1()), _name(name)
        cert = _unsigned(subject, subject, key.public_key(), key.public_key(), ca=True).sign(key, hashes.SHA256())
        (folder / "ca.crt").write_bytes(cert.public_bytes(Encoding.PEM))
        return cls(folder, cert, key)

    def server(self, name: str, hosts: Sequence[str] = ("127.0.0.1", "localhost")) -> Pair:
        """A server's certificate for these addresses."""
        return self._issue(f"{name}-server", _name(name), ExtendedKeyUsageOID.SERVER_AUTH, hosts)

    def client(self, user: str, groups: Sequence[str] = ()) -> Pair:
        """A client's certificate; the API server reads `user` and `groups` from it."""
        return self._issue(f"{user}-client", _name(user, groups), ExtendedKeyUsageOID.CLIENT_AUTH, ())

    def _issue(self, file: str, subject: x509.Name, use: x509.ObjectIdentifier, hosts: Sequence[str]) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _unsigned(subject, self._cert.subject, key.public_key(), self._key.public_key(), ca=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([use]), critical=False)
        if hosts:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False
            )
        pair = Pair(self._folder / f"{_plain(file)}.crt", self._folder / f"{_plain(file)}.key")
        pair.cert.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))
        _write_key(pair.key, key)
        return pair


def service_account_keys(folder: Path) -> Pair:
    """The pair that signs and checks ServiceAccount tokens; `cert` is the public key."""
    key = ec.generate_private_key(ec.SECP256R1())
    pair = Pair(folder / "service-accounts.pub", folder / "service-accounts.key")
    pair.cert.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    _write_key(pair.key, key)
    return pair


def _unsigned(
    subject: x509.Name, issuer: x509.Name, own: ec.EllipticCurvePublicKey, signer: ec.EllipticCurvePublicKey, ca: bool
) -> x509.CertificateBuilder:
    """The common part of all certificates, key identifiers included: Python 3.13 rejects certificates without them."""
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=own)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + LIFE)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(_usage(ca), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(own), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
    )


def _usage(ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        key_cert_sign=ca,
        crl_sign=ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(user: str, groups: Sequence[str] = ()) -> x509.Name:
    organisations = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*organisations, x509.NameAttribute(NameOID.COMMON_NAME, user)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _plain(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-." else "-" for letter in name)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
