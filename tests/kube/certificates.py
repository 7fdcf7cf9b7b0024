"""A certificate authority for tests, and the certificates it issues."""

import datetime
import ssl
import tempfile
from collections.abc import Sequence

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

NOT_BEFORE = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
NOT_AFTER = datetime.datetime(2120, 1, 1, tzinfo=datetime.UTC)


class Issued(msgspec.Struct, frozen=True):
    """A certificate and its key, PEM."""

    certificate: bytes
    key: bytes

    @property
    def pem(self) -> bytes:
        return self.certificate + self.key

    def load_into(self, context: ssl.SSLContext) -> None:
        with tempfile.NamedTemporaryFile() as file:
            file.write(self.pem)
            file.flush()
            context.load_cert_chain(file.name)


class Authority:
    """A certificate authority."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("test authority")
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        builder = self._builder(self._name, self._key.public_key()).add_extension(usage, True)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        self.pem = builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)

    def issue(self, name: str, also: Sequence[str] = ()) -> Issued:
        """A certificate for a server or a client of this name; `also`: further alternative names."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.DNSName(alternative) for alternative in (name, *also)])
        signed = (
            self._builder(_name(name), key.public_key()).add_extension(names, False).sign(self._key, hashes.SHA256())
        )
        key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return Issued(signed.public_bytes(Encoding.PEM), key_pem)

    def _builder(self, name: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(self._name).public_key(key)
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            builder.serial_number(x509.random_serial_number())
            .not_valid_before(NOT_BEFORE)
            .not_valid_after(NOT_AFTER)
            .add_extension(identifier, False)
        )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
