"""Parts of a core's Welcome: its epoch, and the list of the files that frontends may get."""

import hashlib
import secrets

from quire.ipc.messages.frontend import FileInfo


def new_epoch() -> int:
    """A number for this life of a core that no other core has: 62 random bits, never 0."""
    return secrets.randbits(62) | 1


def file_infos(files: dict[str, bytes]) -> list[FileInfo]:
    """The list of files for a Welcome."""
    return [FileInfo(name, hashlib.sha256(data).hexdigest(), len(data)) for name, data in files.items()]
