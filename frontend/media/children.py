"""MediaChildren: the processes that decode and preprocess media (child.py), asked several at a time, none longer than it may.

Each is an AskedChild with a thread that waits for it, so no decoder runs in the frontend. One that dies is replaced, and its
question asked once more; a question at which two end, or that takes too much CPU time, is at fault. Keys take turns
(FairExecutor).
"""

import asyncio
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import msgspec

from quire.frontend.media.child_messages import Answer, ChildConfig, Question, Ready
from quire.ipc.media import MEDIA_CHILD_BYTES, MEDIA_CPU_S
from quire.ipc.process.asked_child import AskedChild
from quire.ipc.process.fair_executor import FairExecutor

log = logging.getLogger("quire")

MODULE = "quire.frontend.media.child"
# Its environment: how this process finds its modules, and one thread for each library.
_KEPT = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "LD_LIBRARY_PATH")
_ADDED = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

_encode = msgspec.msgpack.Encoder().encode
_decode_ready = msgspec.msgpack.Decoder(Ready).decode
_decode_answer = msgspec.msgpack.Decoder(Answer).decode


class MediaChildrenError(RuntimeError):
    """The children cannot work; the text is for the operator."""


class MediaChildren:
    """files: the checkpoint's, as for Processor. All methods but `ask` and `start` may be called from any thread."""

    def __init__(self, files: Mapping[str, bytes], options: Mapping[str, Any], num_children: int) -> None:
        self._files, self._options = dict(files), dict(options)
        self._children = [AskedChild(MODULE, environment()) for _ in range(num_children)]
        self._free: SimpleQueue[AskedChild] = SimpleQueue()
        self._threads = ThreadPoolExecutor(num_children, "quire-media")
        self._turns = FairExecutor(self._threads, num_children, leaves_room=False)
        self._is_closed = False

    async def start(self) -> None:
        """Start all and wait until they are ready. Raises MediaChildrenError."""
        loop = asyncio.get_running_loop()
        started = [loop.run_in_executor(self._threads, self._start, child) for child in self._children]
        try:
            ready = await asyncio.gather(*started)
        except OSError as error:
            raise MediaChildrenError(f"the processes that read images cannot be started: {error}") from error
        if wrong := next((each.error for each in ready if each.error), ""):
            raise MediaChildrenError(f"the model's image processor cannot be used: {wrong}")
        if cage := next((each.cage_error for each in ready if each.cage_error), ""):
            log.warning("the processes that read images run without a sandbox, which this machine does not allow: %s", cage)
        for child in self._children:
            self._free.put(child)

    def _start(self, child: AskedChild) -> Ready:
        said = child.start(lambda fd: ChildConfig(fd, self._files, dict(self._options), MEDIA_CHILD_BYTES))
        return _decode_ready(said) if said else Ready(error="it ended before it was ready")

    async def ask(self, question: Question, owner: str) -> Answer | None:
        """The answer about an image, at the turn of its owner. None: it took too much time, or ended two children. Raises
        OSError if no child can be started, or two were lost to something else."""
        work = self._turns.submit(lambda: self._ask(question), owner, len(question.data))
        return await asyncio.wrap_future(work)

    def _ask(self, question: Question) -> Answer | None:
        child = self._free.get()
        try:
            if not child.is_there and (error := self._start(child).error):
                raise OSError(f"a process that reads images does not start: {error}")
            answer = child.ask(_encode(question), MEDIA_CPU_S)
        finally:
            self._free.put(child)
        return _decode_answer(answer) if answer else None

    async def close(self) -> None:
        """End all. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._threads.shutdown(cancel_futures=True)  # a child that is closed while it is asked would be started again
        for child in self._children:
            child.close()


def environment() -> dict[str, str]:
    """The environment of a child: nothing of this process's but what it takes to load modules."""
    return {name: os.environ[name] for name in _KEPT if name in os.environ} | _ADDED


def num_children(wanted: int | None, num_frontends: int, num_cpus: int) -> int:
    """How many children a frontend has. wanted: --mm-processor-workers, for all frontends of a server; None: half the cores, at
    most 4."""
    total = wanted if wanted is not None else min(max(num_cpus // 2, 1), 4)
    return max(1, total // num_frontends)
