"""Certificates for tests of TLS: a new authority, and certificates that it signs, as PEM files."""

import datetime
import functools
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Certified(NamedTuple):
    """A certificate and its key, PEM."""

    certificate: bytes
    key: bytes

    def write(self, folder: Path, name: str) -> tuple[str, str]:
        """Paths of two files."""
        certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
        certificate.write_bytes(self.certificate)
        key.write_bytes(self.key)
        return str(certificate), str(key)


@functools.cache
def _authority() -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
    builder = _builder(name, name, key).add_extension(x509.BasicConstraints(True, None), critical=True)
    return builder.sign(key, hashes.SHA256()), key


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(hours=1))
    return builder.not_valid_after(now + datetime.timedelta(days=1))


def authority() -> bytes:
    """The certificate that the others are signed with, PEM."""
    return _authority()[0].public_bytes(serialization.Encoding.PEM)


def certified(name: str = "localhost", password: bytes | None = None) -> Certified:
    """A new certificate for a host, or for a client."""
    signer, signing_key = _authority()
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), signer.subject, key)
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    locked = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return Certified(
        builder.sign(signing_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked),
    )
