"""Processes that compile kernels into Triton's cache: threads of one process wait for one another, in Python.

    python -m quire.kernels.triton_support.compile_process     reads jobs, a line each; answers each with a byte

A process ends when its standard input does, so none outlives its parent, and it makes no context on the GPU. A failure in one
has no consequence: the parent then compiles the kernel itself and gets the error.
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
FEW = 8  # up to this many kernels the parent compiles alone in the 2 to 4 s that a process takes to load torch
JOB_TIMEOUT_S = 120.0  # limit for an answer: a kernel takes some tenths of a second

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
        """The job as a Python literal. Raises ValueError if some of its values have none."""
        text = repr(tuple(self))
        if ast.literal_eval(text) != tuple(self):
            raise ValueError(f"{self.name}: not all of its description is a literal")
        return text.encode() + b"\n"


class CompileProcesses:
    """Up to `count` processes, each started when it is first needed; a context manager, safe for any number of threads."""

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
        """compile_here() for an announced kernel: after a process has compiled it, or if this process is free."""
        with self._changed:
            self._changed.wait_for(lambda: self._free and (self._are_many or None in self._free))
            turn = self._free.pop()  # None, this process, if that is free
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
        """Have the process try the job, and wait for its answer; returns at once if the process cannot do it."""
        if self._is_lost:
            return
        try:
            line = job.line()
        except (ValueError, SyntaxError):  # the parent must compile such a job
            return
        try:
            self._is_lost = self._answer(line) != _TRIED
        except OSError:
            self._is_lost = True

    def _answer(self, line: bytes) -> bytes:
        if self._process is None:
            # errors are reported when the parent compiles the kernel again
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
            with contextlib.suppress(OSError):  # from data that was not flushed to a lost process
                self._process.communicate()


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a compiler's output must not be taken for an answer
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
    kernel.create_binder()  # which sets the kernel's language
    source = kernel.ASTSource(kernel, job.signature, job.constexprs, job.attrs)
    triton.compile(source, target=target, options=dict(job.options))


if __name__ == "__main__":
    main()
