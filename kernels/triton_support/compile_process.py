"""Processes that compile kernels into Triton's cache: threads of one process wait for one another, much of it being Python.

    python -m quire.kernels.triton_support.compile_process     reads jobs, a line each; answers each with a byte

A process ends when its standard input does, so none outlives whoever started it, and makes no context on the GPU. What fails
in one is of no consequence: whoever asked compiles the kernel himself then, and is told what is wrong with it.
"""

import ast
import contextlib
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace, TracebackType
from typing import Any, NamedTuple, Self, TypeVar

T = TypeVar("T")

COMMAND = [sys.executable, "-P", "-m", "quire.kernels.triton_support.compile_process"]
FEW = 8  # kernels are compiled by this process alone in the 2 to 4 s that another takes to load torch
JOB_TIMEOUT_S = 120.0  # without an answer: a kernel takes some tenths of a second

_TRIED = b"."


class Job(NamedTuple):
    """A kernel as Triton describes it to its compiler. target: backend, architecture, threads of a warp."""

    module: str
    name: str
    signature: Mapping[str, Any]
    constexprs: Mapping[Any, Any]
    attrs: Mapping[Any, Any]
    options: Mapping[str, Any]
    target: tuple[str, int, int]

    def line(self) -> bytes:
        """Itself as a literal of Python. Raises ValueError if it holds what has none."""
        text = repr(tuple(self))
        if ast.literal_eval(text) != tuple(self):
            raise ValueError(f"{self.name}: not all of its description is a literal")
        return text.encode() + b"\n"


class CompileProcesses:
    """So many processes, each started when it is wanted; a context manager. For any number of threads."""

    def __init__(self, count: int) -> None:
        self._processes = [_Process() for _ in range(count)]
        self._free: list[_Process | None] = [*self._processes, None]  # None: this process, which has nothing to load first
        self._num_left = 0
        self._are_many = False
        self._changed = threading.Condition()

    def announce(self) -> None:
        """One more kernel will be compiled. Processes are worth their start only if there are many."""
        with self._changed:
            self._num_left += 1
            self._are_many |= self._num_left > FEW
            self._changed.notify_all()

    def compile(self, job: Job, compile_here: Callable[[], T]) -> T:
        """compile_here(), of a kernel that was announced: when a process has compiled it, or when it is this one's turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._free and (self._are_many or None in self._free))
            turn = self._free.pop()  # this process's own, if that is free
        try:
            if turn is not None:
                turn.compile(job)
            return compile_here()
        finally:
            with self._changed:
                self._free.insert(len(self._free) if turn is None else 0, turn)
                self._num_left -= 1
                self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            process.end()


class _Process:
    """One process, serving one thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_lost = False

    def compile(self, job: Job) -> None:
        """Returns when it has been tried; at once if the process cannot do it."""
        if self._is_lost:
            return
        try:
            line = job.line()
        except (ValueError, SyntaxError):  # such a job is for this process
            return
        try:
            self._is_lost = self._answer(line) != _TRIED
        except OSError:
            self._is_lost = True

    def _answer(self, line: bytes) -> bytes:
        if self._process is None:
            # an error is told by whoever compiles the kernel again
            pipe, null = subprocess.PIPE, subprocess.DEVNULL
            self._process = subprocess.Popen(COMMAND, stdin=pipe, stdout=pipe, stderr=null, process_group=0)
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(line)
        stdin.flush()
        ready, _, _ = select.select([stdout], [], [], JOB_TIMEOUT_S)
        return stdout.read(1) if ready else b""

    def end(self) -> None:
        self._is_lost = True
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(OSError):  # of what was not flushed to a process that was lost
                self._process.communicate()


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a compiler prints is no answer
    for line in sys.stdin.buffer:
        with contextlib.suppress(Exception):
            _compile(Job(*ast.literal_eval(line.decode())))
        answers.write(_TRIED)


def _compile(job: Job) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from quire.kernels.compile_list import compiled_kernels

    target = GPUTarget(*job.target)
    driver.set_active(SimpleNamespace(get_current_target=lambda: target))  # type: ignore[arg-type]
    kernel = compiled_kernels()[job.module, job.name]
    kernel.create_binder()  # which chooses its language
    source = kernel.ASTSource(kernel, job.signature, job.constexprs, job.attrs)
    triton.compile(source, target=target, options=dict(job.options))


if __name__ == "__main__":
    main()
