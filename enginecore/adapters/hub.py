"""Hub: adapters that are named by the hub's ids, OWNER/NAME, and downloaded by a process of their own (download.py).

While the engine serves, only repositories of the owners that --lora-hub names are downloaded; at the start, --lora-modules may
name any. Folders (folders.py) owns it. Downloads run one after the other, in a thread of their own.
"""

import logging
import os
import queue
import threading
from collections.abc import Callable

import msgspec

from quire.enginecore.adapters.download import DownloadAnswer, DownloadConfig, DownloadQuestion
from quire.enginecore.loading.hub import is_hub_id
from quire.ipc.adapters import AdapterError, AdapterMissing
from quire.ipc.lora_flags import ANY_OWNER
from quire.ipc.process.asked_child import AskedChild

log = logging.getLogger("quire.enginecore")

MODULE = "quire.enginecore.adapters.download"
DOWNLOAD_S = 600.0


class Hub:
    """owners: those of --lora-hub, ANY_OWNER among them for all. cache: the folder of downloads; None: huggingface_hub's.
    token: None: the environment's. most_s: seconds that a download may take by the clock, as later ones wait for it."""

    def __init__(
        self, owners: tuple[str, ...] = (), cache: str | None = None, token: str | None = None, most_s: float = DOWNLOAD_S
    ) -> None:
        self._owners, self._cache, self._token, self.most_s = owners, cache, token, most_s
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def fetch(self, repository: str, done: Callable[[str | AdapterError], None]) -> None:
        """Download a repository of one of the owners; `done` gets its folder, in the thread of downloads."""

        def work() -> None:
            try:
                self._check_owner(repository)
                found: str | AdapterError = self.download(repository)
            except AdapterError as error:
                found = error
            except Exception as error:  # else the thread would end, and with it all later downloads
                log.exception("%s cannot be downloaded", repository)
                found = AdapterError(f"{repository} cannot be downloaded: {type(error).__name__}")
            done(found)

        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="adapter downloads", daemon=True)
            self._thread.start()
        self._calls.put(work)

    def _run(self) -> None:
        while True:
            self._calls.get()()

    def names_one(self, path: str) -> bool:
        """Whether a path is a hub id: it has one slash, and there is no such folder."""
        return path.count("/") == 1 and is_hub_id(path) and not os.path.isdir(path)

    def _check_owner(self, repository: str) -> None:
        """Raises AdapterError."""
        owner = repository.partition("/")[0]
        if owner in self._owners:
            return
        if ANY_OWNER in self._owners and os.path.isdir(owner):  # a path with a typing error
            which = f"and {owner!r} is a folder here: an owner on the hub of this name must be named by --lora-hub"
            raise AdapterMissing(f"there is no folder {repository!r}, {which}")
        if ANY_OWNER not in self._owners:
            raise AdapterError(f"lora_path {repository!r} is no folder, and --lora-hub does not name the owner {owner!r}")

    def has(self, folder: str) -> bool:
        """Whether a real path is that of a downloaded adapter of one of the owners."""
        owned = ("models--" if owner == ANY_OWNER else f"models--{owner}--" for owner in self._owners)
        return any(folder.startswith(os.path.join(self._place(), name)) for name in owned)

    def _place(self) -> str:
        if self._cache is not None:
            return os.path.realpath(self._cache)
        from huggingface_hub import constants

        return os.path.realpath(constants.HF_HUB_CACHE)

    def download(self, repository: str) -> str:
        """The folder of a repository's two files, which are downloaded unless they are cached. Raises AdapterError."""
        child = AskedChild(MODULE)
        try:
            if not child.start(DownloadConfig):
                raise AdapterError("the process that downloads adapters did not start")
            question = msgspec.msgpack.encode(DownloadQuestion(repository, self._cache, self._token))
            answer = child.ask(question, self.most_s, wall_s=self.most_s)
        except OSError as error:
            raise AdapterError(f"{repository} cannot be downloaded now: {error.strerror or error}") from None
        finally:
            child.close()
        if not answer:
            why = f"it takes more than {self.most_s:g} s" if answer is None else "the process that downloads it crashes"
            raise AdapterError(f"{repository} cannot be downloaded: {why}")
        said = msgspec.msgpack.decode(answer, type=DownloadAnswer)
        if said.error:
            raise AdapterMissing(said.error) if said.is_missing else AdapterError(said.error)
        return said.folder
