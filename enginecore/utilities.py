"""Utilities: answers what frontends ask of the engine beside requests (ipc/messages/utilities.py).

Some calls are answered at once. Those for the workers are answered when every rank has replied to a control record; meanwhile
the loop goes on. If a worker ends, its reply is an error, so no call stays open. Owned by the core's loop.
"""

import logging
from collections.abc import Callable

from quire.enginecore.adapters.calls import answer_call
from quire.enginecore.owners import Owners
from quire.enginecore.requests import Requests
from quire.enginecore.workers import WorkerGroup
from quire.ipc.messages.frontend import Utility, UtilityResult
from quire.ipc.messages.utilities import (
    FindAdapter,
    GetServerInfo,
    LoadFolder,
    PinAdapter,
    ProfileDone,
    ResetDone,
    ResetPrefixCache,
    RestoreAdapters,
    ServerInfo,
    StartProfile,
    StopProfile,
    UnloadAdapter,
    UtilityAnswer,
    UtilityFailed,
)
from quire.ipc.messages.workers import ControlReply, ControlRequest, DumpStacks, StartProfiler, StopProfiler
from quire.ipc.process.stacks import stacks

log = logging.getLogger("quire.enginecore")

Answer = Callable[[UtilityAnswer], None]


class Utilities:
    """info: shown by /server_info. has_profiler: whether --profile-dir was given."""

    def __init__(self, owners: Owners, workers: WorkerGroup, requests: Requests, info: ServerInfo, has_profiler: bool) -> None:
        self._owners, self._workers, self._scheduler = owners, workers, requests.scheduler
        self._adapters = requests.adapters
        self._info = info
        self._has_profiler = has_profiler

    def handle(self, owner: int, message: Utility, epoch: int) -> None:
        """Do what was asked, and send the answer, now or when the workers have replied."""

        def answer(what: UtilityAnswer) -> None:
            self._owners.send(owner, UtilityResult(epoch, message.id, what))

        match message.call:
            case ResetPrefixCache():
                log.info("the prefix cache is emptied, as asked")
                self._scheduler.kv.forget_all()
                answer(ResetDone(not self._scheduler.has_requests))
            case StartProfile():
                self._profile(StartProfiler, answer)
            case StopProfile():
                self._profile(StopProfiler, answer)
            case GetServerInfo():
                answer(self._info)
            case LoadFolder() | UnloadAdapter() | FindAdapter() | PinAdapter() | RestoreAdapters() as call:
                answer_call(self._adapters, call, answer)

    def log_stacks(self) -> None:
        """Log the stacks of the core's and the serving workers' threads."""
        log.info("stacks of the core:\n%s", stacks())
        if self._workers.is_ready:
            self._workers.send_control(DumpStacks, _log_reply)

    def _profile(self, make: Callable[[int], ControlRequest], answer: Answer) -> None:
        if not self._has_profiler:
            text = "profiling needs a folder for its traces: start the engine with --profile-dir"
            return answer(UtilityFailed("invalid", text))
        if not self._workers.is_ready:
            return answer(UtilityFailed("engine_error", "the engine's workers are starting"))
        replies: list[ControlReply] = []

        def on_reply(reply: ControlReply) -> None:
            replies.append(reply)
            if len(replies) == self._workers.world_size:
                answer(_profiled(replies))

        return self._workers.send_control(make, on_reply)


def _profiled(replies: list[ControlReply]) -> UtilityAnswer:
    if error := next((reply.error for reply in replies if reply.error), None):
        return UtilityFailed("invalid", error)
    return ProfileDone([reply.payload.decode() for reply in replies if reply.payload])


def _log_reply(reply: ControlReply) -> None:
    log.info("stacks of worker %d:\n%s", reply.rank, reply.error or reply.payload.decode(errors="replace"))
