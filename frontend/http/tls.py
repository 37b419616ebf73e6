"""TLS: a context made from the files that the flags name, and made again when they change (--enable-ssl-refresh).

Nothing here listens: listener.py does, and uses the new context for new connections. A file that cannot be used is reported
with its flag's name: as an error at the start, later in the log.
"""

import os
import ssl

import msgspec


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The values of --ssl-*. cert_reqs: 0, clients need no certificate; 1, one that they show must be valid; 2, they need
    one."""

    certfile: str
    keyfile: str | None = None  # None: in certfile
    ca_certs: str | None = None
    cert_reqs: int = 0
    ciphers: str | None = None
    refresh: bool = False

    def stamp(self) -> list[tuple[int, int, int] | None]:
        """A value that changes when a file does, also when a symbolic link now leads elsewhere."""
        found: list[tuple[int, int, int] | None] = []
        for path in filter(None, (self.certfile, self.keyfile, self.ca_certs)):
            try:
                status = os.stat(path)
                found.append((status.st_mtime_ns, status.st_ino, status.st_size))
            except OSError:
                found.append(None)
        return found


def make_context(files: TlsFiles) -> ssl.SSLContext:
    """Raises ValueError, which names the flag and what is wrong with it."""
    for flag, path in (("certfile", files.certfile), ("keyfile", files.keyfile), ("ca-certs", files.ca_certs)):
        try:
            if path is not None:
                open(path, "rb").close()
        except OSError as error:
            raise ValueError(f"--ssl-{flag} {path}: {error.strerror}") from None
    if files.cert_reqs and files.ca_certs is None:
        raise ValueError("--ssl-cert-reqs 1 and 2 need --ssl-ca-certs: whose certificates clients may have")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(files.certfile, files.keyfile, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError, and so is a file that was just removed
        raise ValueError(
            f"--ssl-certfile {files.certfile}, --ssl-keyfile {files.keyfile or files.certfile}: no certificate in PEM and the "
            f"key that belongs to it, without a password ({_reason(error)})"
        ) from None
    try:
        if files.ca_certs is not None:
            context.load_verify_locations(files.ca_certs)
    except OSError as error:
        raise ValueError(f"--ssl-ca-certs {files.ca_certs}: no certificates in PEM ({_reason(error)})") from None
    try:
        if files.ciphers is not None:
            context.set_ciphers(files.ciphers)
    except ssl.SSLError as error:
        raise ValueError(f"--ssl-ciphers {files.ciphers}: {_reason(error)}") from None
    context.verify_mode = ssl.VerifyMode(files.cert_reqs)
    return context


def _no_password() -> str:
    """Keep OpenSSL from asking for a key's password on the terminal; "" fails for every encrypted key."""
    return ""


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error)
