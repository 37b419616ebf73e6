"""Places for sockets: private directories that their process owns and removes, a user's own ipc path, and allowed addresses.

A private directory (mode 0700) is locked as long as its process lives, and removed at exit. If the process was killed, the next
process that makes one finds the directory by its free lock and removes it.
"""

import atexit
import errno
import fcntl
import ipaddress
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MAX_SOCKET_PATH = 107  # bytes, sockaddr_un
_PREFIX = "quire-ipc-"
_held: dict[str, int] = {}  # private directories of this process and the descriptors that lock them
_removing = threading.RLock()  # an exit waits for a thread that is removing directories


def private_directory() -> str:
    """Make a directory that only this user can enter, removed when this process ends. Raises OSError."""
    base = _base_directory()
    while True:
        try:
            _remove_stale_directories(base)
            path = tempfile.mkdtemp(prefix=_PREFIX, dir=base)
        except OSError as error:
            why = f"no folder for sockets can be made in {base}: {error.strerror}; XDG_RUNTIME_DIR names another place"
            raise OSError(error.errno, why) from None
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another process removed it as stale
        fcntl.flock(fd, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                if not _held:
                    atexit.register(remove_private_directories)
                _held[path] = fd
                return path
        os.close(fd)  # removed between our open and lock


def remove_private_directory(path: str) -> None:
    """Remove one directory of `private_directory`, if it is not gone already."""
    with _removing:
        fd = _held.pop(path, None)
        if fd is not None:
            _remove_directory(path)
            os.close(fd)


def remove_private_directories() -> None:
    """Remove all that this process holds; for exits that skip atexit."""
    with _removing:
        for path in list(_held):
            remove_private_directory(path)


def _base_directory() -> str:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and len(os.fsencode(runtime)) <= 64 and os.access(runtime, os.W_OK | os.X_OK):
        return runtime
    return "/tmp"  # not TMPDIR: a socket's path must stay short


def _remove_stale_directories(base: str) -> None:
    with os.scandir(base) as entries:
        names = [e.path for e in entries if e.name.startswith(_PREFIX) and e.is_dir(follow_symlinks=False)]
    for path in names:
        with suppress(OSError):  # gone, not ours, or its owner lives (BlockingIOError)
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                info = os.fstat(fd)
                if info.st_uid == os.getuid() and stat.S_IMODE(info.st_mode) == 0o700:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove_directory(path)
            finally:
                os.close(fd)


def _remove_directory(path: str) -> None:
    """Remove the sockets in a directory and its subfolders, then the directory itself. If it holds anything else it stays.

    A subfolder holds an engine's socket at an address that its launcher has chosen.
    """
    with suppress(OSError):
        for name in os.listdir(path):
            file = os.path.join(path, name)
            with suppress(FileNotFoundError):  # its owner removed it first
                mode = os.lstat(file).st_mode
                if stat.S_ISSOCK(mode):
                    os.unlink(file)
                elif stat.S_ISDIR(mode):
                    _remove_directory(file)
        os.rmdir(path)


def socket_path(address: str) -> str | None:
    """The file of an ipc:// address, None for another transport. Raises ValueError if it is too long or no absolute path."""
    if not address.startswith("ipc://"):
        return None
    path = address.removeprefix("ipc://")
    if not path.startswith("/"):
        raise ValueError(f"{address}: an ipc address needs an absolute path, as in ipc:///run/quire.sock")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise ValueError(f"{address}: a socket's path may be at most {MAX_SOCKET_PATH} bytes long")
    return path


@contextmanager
def claim_socket_path(path: str, timeout_s: float = 5.0) -> Iterator[None]:
    """A context around bind: removes a dead process's socket file, raises FileExistsError if the path is in use or no socket.

    The lock on the folder prevents two starting daemons from both finding the path free.
    """
    with _locked_directory(str(Path(path).parent), timeout_s):
        if os.path.lexists(path):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise FileExistsError(errno.EEXIST, "exists and is no socket", path)
            if _is_listening(path):
                raise FileExistsError(errno.EADDRINUSE, "another process listens there", path)
            os.unlink(path)
        yield


def _is_listening(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # EAGAIN from a full backlog means that a process listens
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except BlockingIOError:
            return True
    return True


@contextmanager
def _locked_directory(directory: str, timeout_s: float) -> Iterator[None]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(errno.ETIMEDOUT, "the folder is locked by another process", directory) from None
                time.sleep(0.01)
        yield
    finally:
        os.close(fd)


def is_tcp(address: str | None) -> bool:
    return address is not None and address.startswith("tcp://")


def check_address(address: str) -> str | None:
    """Check an address; returns the host of a tcp address, None for ipc. Raises ValueError, which says what to do."""
    if socket_path(address) is not None:
        return None
    if not is_tcp(address):
        raise ValueError(f"{address}: an address starts with ipc:// or tcp://")
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not colon or not (port == "*" or (port.isdecimal() and int(port) < 65536)):
        raise ValueError(f"{address}: a tcp address is tcp://host:port")
    return host


def check_listen_address(address: str, has_keys: bool) -> None:
    """Like check_address, and allow tcp without keys only on loopback."""
    host = check_address(address)
    if host is not None and not has_keys and not is_loopback(host):
        raise ValueError(
            f"{address}: listening beyond this machine needs --curve-secret-key-file and --curve-allow-file;"
            " without keys only ipc:// and loopback addresses are allowed"
        )


def is_loopback(host: str) -> bool:
    """Whether the host of a tcp address is loopback."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
