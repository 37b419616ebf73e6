"""Profiler: runs torch's profiler in one worker from one control request to another, and writes the trace to a file.

A trace grows with every step, and the worker runs nothing while it writes one: so a recording ends by itself after MAX_STEPS.
Traces open in https://ui.perfetto.dev and in TensorBoard. Called by the worker's loop.
"""

import logging
import os
import socket
import time

import torch
from torch.profiler import ProfilerActivity, profile

log = logging.getLogger("quire.workers")

MAX_STEPS = 1000  # of a recording: a few hundred thousand kernels


class ProfilerError(Exception):
    """Profiling cannot start or stop; the text is for the user who asked for it."""


class Profiler:
    """folder: where traces are written; None: `start` fails."""

    def __init__(self, folder: str | None, rank: int, device: str) -> None:
        self._folder = folder
        self._rank = rank
        self._is_cuda = device == "cuda"
        self._profile: profile | None = None
        self._num_steps = 0
        self._written = ""  # the trace of a recording that ended by itself

    @property
    def is_active(self) -> bool:
        return self._profile is not None

    def start(self) -> None:
        """Begin to record. Raises ProfilerError."""
        if self._folder is None:
            raise ProfilerError("profiling needs a folder for its traces: start the engine with --profile-dir")
        if self._profile is not None:
            raise ProfilerError("profiling is under way already: /stop_profile ends it")
        try:
            os.makedirs(self._folder, exist_ok=True)
        except OSError as error:
            log.error("--profile-dir %s: %s", self._folder, error.strerror)
            raise ProfilerError("the folder of --profile-dir cannot be made") from None
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._is_cuda else [])]
        self._profile, self._num_steps, self._written = profile(activities=activities), 0, ""
        self._profile.start()
        log.info("profiling: at most %d steps", MAX_STEPS)

    def step_done(self) -> None:
        """A step was given to the device, while recording."""
        self._num_steps += 1
        if self._num_steps >= MAX_STEPS:
            try:
                self._written = self._write()
            except ProfilerError as error:
                log.error("%s", error)

    def stop(self) -> str:
        """Write what was recorded; returns the file's name. Raises ProfilerError."""
        if self._profile is not None:
            return self._write()
        if not self._written:
            raise ProfilerError("no profiling is under way: /start_profile begins it")
        written, self._written = self._written, ""
        return written

    def _write(self) -> str:
        recorded, self._profile = self._profile, None
        assert recorded is not None and self._folder is not None
        if self._is_cuda:
            torch.cuda.synchronize()
        recorded.stop()
        name = f"{socket.gethostname()}-rank{self._rank}.{time.time_ns()}.pt.trace.json.gz"
        path = os.path.join(self._folder, name)
        try:
            recorded.export_chrome_trace(path)
        except (OSError, RuntimeError) as error:
            log.error("the trace %s cannot be written: %s", path, error)
            raise ProfilerError("the trace cannot be written into the folder of --profile-dir") from None
        log.info("profiled %d steps: %s", self._num_steps, path)
        return name
