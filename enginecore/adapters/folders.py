"""Folders: reads adapters' folders in a child process, in a thread, one after the other.

A folder's files are chosen by whoever may load adapters, and regular expressions among them may take for ever: the child is
killed then. It is started with the engine. Which folders may be read at all is decided here.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from quire.enginecore.adapters.hub import Hub
from quire.ipc.adapters import (
    AdapterError,
    AdapterLimits,
    AdapterMissing,
    AdapterPlan,
    FolderAnswer,
    FolderQuestion,
    ReadingConfig,
)
from quire.ipc.process.asked_child import AskedChild

MODULE = "quire.workers.adapters.reading"
READ_S = 2.0

Found = AdapterPlan | AdapterError
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FolderAnswer).decode


class Folders:
    """later: runs a call in the core's thread. hub: where adapters may be downloaded from."""

    def __init__(self, limits: AdapterLimits, later: Callable[[Callable[[], None]], None], hub: Hub | None = None) -> None:
        self._limits, self._later, self.hub = limits, later, hub or Hub()
        self._thread = ThreadPoolExecutor(1, "adapters")
        self._child = AskedChild(MODULE)
        self._thread.submit(self._start)

    def read(self, path: str, done: Callable[[Found], None], trusted: bool = False) -> None:
        """Read a folder that lies in one of --lora-dirs, or a repository of the hub; `done` is called in the core's thread.
        trusted: anywhere."""
        if not trusted and self.hub.names_one(path):
            self.hub.fetch(path, lambda found: self._was_fetched(found, done))
        else:
            self._submit(lambda: path if trusted else self.checked(path), done)

    def _was_fetched(self, found: str | AdapterError, done: Callable[[Found], None]) -> None:
        if isinstance(found, AdapterError):
            self._later(lambda: done(found))
        else:
            self._submit(lambda: found, done)

    def find(self, name: str, done: Callable[[Found], None]) -> None:
        """As `read`, for the folder of this name directly in one of --lora-dirs."""
        self._submit(lambda: self._found(name), done)

    def _submit(self, path: Callable[[], str], done: Callable[[Found], None]) -> None:
        def work() -> None:
            try:
                found: Found = self._read(path())
            except AdapterError as error:
                found = error
            except OSError as error:  # no process can be started
                found = AdapterError(f"adapters cannot be read now: {error.strerror or error}")
            self._later(lambda: done(found))

        self._thread.submit(work)

    def checked(self, path: str) -> str:
        """The real path of a folder. Raises AdapterError."""
        if "\0" in path:
            raise AdapterError("lora_path must not hold NUL")
        real = os.path.realpath(path)
        dirs = [os.path.realpath(folder) for folder in self._limits.dirs]
        is_below = any(real == folder or real.startswith(os.path.join(folder, "")) for folder in dirs)
        if not is_below and not self.hub.has(real):
            raise AdapterError(f"lora_path {path!r} does not lie in one of --lora-dirs")
        return real

    def _found(self, name: str) -> str:
        for folder in self._limits.dirs:
            if os.path.isdir(os.path.join(folder, name)):
                return self.checked(os.path.join(folder, name))
        raise AdapterMissing(f"no folder of --lora-dirs has an adapter {name!r}")

    def read_now(self, path: str) -> AdapterPlan:
        """Read a folder anywhere, or any repository of the hub, and wait for it. Raises AdapterError, OSError."""
        folder = self.hub.download(path) if self.hub.names_one(path) else os.path.realpath(path)
        return self._thread.submit(self._read, folder).result()

    def _read(self, folder: str) -> AdapterPlan:
        if not os.path.isdir(folder):
            raise AdapterMissing(f"there is no folder {folder!r}")
        if not self._child.is_there:
            self._start()
        answer = self._child.ask(_encode(FolderQuestion(folder, self._limits)), READ_S)
        if answer is None:
            raise AdapterError(f"adapter_config.json or the names of its tensors take more than {READ_S:g} s to read")
        if not answer:
            raise AdapterError("it cannot be read: it needs too much memory")
        said = _decode(answer)
        if said.plan is None:
            raise AdapterError(said.error)
        return said.plan

    def _start(self) -> None:
        if not self._child.start(ReadingConfig):
            raise OSError("the process that reads adapters did not start")

    def close(self) -> None:
        """End the child and the thread, after what they do now."""
        self._thread.submit(self._child.close)
        self._thread.shutdown(wait=False)
