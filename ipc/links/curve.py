"""CURVE keys for tcp:// links: key files, the allow-list, and the authenticator that applies it (ZAP, RFC 27).

A key file holds a pair of z85 keys and is readable by its owner only. The core's allow-list file holds the public keys of the
frontends that may connect, one per line; a line that starts with `# ` is a comment (a key may contain a #). Without the list,
every peer that knows the core's public key could connect, so a core on tcp needs both. A frontend needs its own pair and the
core's public key.
"""

import logging
import os
import re
import stat
import struct
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

from quire.ipc.links.limited_log import LimitedLog
from quire.ipc.links.sockets import readable

log = logging.getLogger("quire.enginecore")

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"quire"
_Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


class KeyPair(msgspec.Struct, frozen=True):
    """One side's CURVE keys, z85: 40 ASCII bytes each."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


class CoreKeys(msgspec.Struct, frozen=True):
    """Keys of a core that listens on tcp: its own pair, and the public keys of the frontends that it admits."""

    own: KeyPair
    allowed: frozenset[bytes]


class FrontendKeys(msgspec.Struct, frozen=True):
    """Keys of a frontend that connects over tcp: its own pair and the core's public key."""

    own: KeyPair
    core_public: bytes


def make_keys() -> KeyPair:
    return KeyPair(*zmq.curve_keypair())


def write_keys(path: str | Path, keys: KeyPair) -> None:
    """Write a new key file, mode 0600. Raises FileExistsError instead of replacing a key."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "w") as file:
        file.write("# CURVE key pair of a Quire process. Give away the public key only.\n")
        file.write(f"public {keys.public.decode()}\nsecret {keys.secret.decode()}\n")


def load_keys(path: str | Path) -> KeyPair:
    """Read a key file. Raises ValueError if it is malformed or others may read it."""
    with open(path) as file:
        if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
            raise ValueError(f"{path}: others may read this secret key; run chmod 600 on it")
        fields = dict(line.split(maxsplit=1) for line in file.read().splitlines() if len(line.split()) == 2)
    if not {"public", "secret"} <= fields.keys():
        raise ValueError(f"{path}: a key file has a line 'public KEY' and a line 'secret KEY'")
    keys = KeyPair(parse_key(fields["public"], path), parse_key(fields["secret"], path))
    if zmq.curve_public(keys.secret) != keys.public:
        raise ValueError(f"{path}: the public key does not belong to the secret key")
    return keys


def load_or_make_keys(path: str | Path) -> KeyPair:
    """The pair in a key file, which is made if it does not exist. Raises ValueError or OSError."""
    if not Path(path).exists():
        write_keys(path, make_keys())
    return load_keys(path)


FRONTENDS = (
    "the frontends that may connect into it, one a line (a frontend says its own when it is started with --curve-key-file)"
)
ENGINES = "the engines that may connect into it, one a line (an engine says its own when it is started with --hosts-key-file)"


def load_allow_list(path: str | Path, of: str = FRONTENDS) -> frozenset[bytes]:
    """Read public keys, one per line. Raises ValueError for a malformed line, an empty list, or a missing file.

    of: FRONTENDS or ENGINES, for the text of the error about a missing file.
    """
    try:
        lines = [line.strip() for line in Path(path).read_text().splitlines()]
    except FileNotFoundError:
        raise ValueError(f"{path} is not there: write the public keys of {of}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} cannot be read: it is no text") from None
    keys = frozenset(
        parse_key(line.split()[0], f"{path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line and line != "#" and not line.startswith("# ")
    )
    if not keys:
        raise ValueError(f"{path}: no key in this list: nobody could connect")
    return keys


def load_core_keys(secret_key_file: str | Path, allow_file: str | Path) -> CoreKeys:
    return CoreKeys(load_keys(secret_key_file), load_allow_list(allow_file))


def parse_key(text: str, source: object = "key") -> bytes:
    """A z85 key as bytes. Raises ValueError."""
    key = text.strip().encode()
    try:
        if not _Z85.fullmatch(text.strip()):
            raise ValueError
        z85.decode(key)
    except (ValueError, struct.error):  # struct.error: five characters encode more than 32 bits
        # The text is never echoed: it may be a secret.
        raise ValueError(f"{source}: a key is 40 characters of z85, this is not one") from None
    return key


class Authenticator:
    """Answers libzmq's requests to admit a key. It has no thread: the loop that owns the ROUTER polls `socket`."""

    def __init__(self, context: zmq.Context, allowed: frozenset[bytes]) -> None:
        self._allowed = frozenset(z85.decode(key) for key in allowed)
        self._refusals = LimitedLog(log)
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ZAP_ADDRESS)

    def answer(self) -> None:
        """Answer all requests that have arrived. RFC 27: version, request id, domain, address, identity, mechanism, key."""
        while readable(self.socket):
            version, request, domain, address, _, mechanism, *credentials = self.socket.recv_multipart(zmq.NOBLOCK)
            admit = domain == ZAP_DOMAIN and mechanism == b"CURVE" and credentials[:1] and credentials[0] in self._allowed
            if not admit:
                self._log_refusal(address, credentials[0] if mechanism == b"CURVE" and credentials else b"")
            code, text = (b"200", b"OK") if admit else (b"400", b"this key is not in the core's allow-list")
            self.socket.send_multipart([version, request, code, text, b"", b""])

    def _log_refusal(self, address: bytes, key: bytes) -> None:
        """Log the refused public key, so that an operator can add it to the list."""
        named = z85.encode(key).decode() if len(key) == 32 else "of no such kind"
        where = address.decode(errors="replace")
        self._refusals.warning("a connection from %s is refused: its key, %s, is not in the allow-list", where, named)

    def close(self) -> None:
        self.socket.close()
