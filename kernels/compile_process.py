"""Processes that compile kernels into Triton's cache: threads of one process wait for one another, much of it being Python.

    python -m quire.kernels.compile_process     reads jobs, a line each, and answers each with a byte when it has been tried

A process ends when its standard input does, so none outlives whoever started it, and makes no context on the GPU. What fails
in one is of no consequence: whoever asked compiles the kernel himself then, and is told what is wrong with it.
"""

import ast
import contextlib
import functools
import os
import queue
import subprocess
import sys
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any, NamedTuple, Self, TypeVar

T = TypeVar("T")

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
    """So many processes, each started when it is first wanted; a context manager. For any number of threads."""

    def __init__(self, count: int) -> None:
        self._processes = [_Process() for _ in range(count)]
        self._turns: queue.SimpleQueue[_Process | None] = queue.SimpleQueue()
        for turn in (*self._processes, None):  # None: this process, which has nothing to load first
            self._turns.put(turn)

    def compile(self, job: Job, compile_here: Callable[[], T]) -> T:
        """compile_here(), when a process has compiled the kernel for it, or when it is this process's turn."""
        turn = self._turns.get()
        try:
            if turn is not None:
                turn.compile(job)
            return compile_here()
        finally:
            self._turns.put(turn)

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
            stdin, stdout = self._pipes()
            stdin.write(line)
            stdin.flush()
            self._is_lost = stdout.read(1) != _TRIED
        except OSError:
            self._is_lost = True

    def _pipes(self) -> tuple[Any, Any]:
        if self._process is None:
            command = [sys.executable, "-P", "-m", "quire.kernels.compile_process"]
            # an error is told by whoever compiles the kernel again
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0
            )
        return self._process.stdin, self._process.stdout

    def end(self) -> None:
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

    target = GPUTarget(*job.target)
    driver.set_active(SimpleNamespace(get_current_target=lambda: target))  # type: ignore[arg-type]
    kernel = getattr(_modules()[job.module], job.name)
    kernel.create_binder()  # which chooses its language
    source = kernel.ASTSource(kernel, job.signature, job.constexprs, job.attrs)
    triton.compile(source, target=target, options=dict(job.options))


@functools.cache
def _modules() -> dict[str, ModuleType]:
    """All that have kernels, by name."""
    from quire.kernels import (
        activation,
        attention_decode,
        attention_decode_schedule,
        attention_prefill,
        attention_prefill_hopper,
        attention_prefill_schedule,
        embedding,
        linear,
        linear_hopper,
        norm,
        norm_linear,
        rope_kv,
        sampler,
        sampler_filter,
        split_linear,
        step_inputs,
    )

    modules = [
        activation,
        attention_decode,
        attention_decode_schedule,
        attention_prefill,
        attention_prefill_hopper,
        attention_prefill_schedule,
        embedding,
        linear,
        linear_hopper,
        norm,
        norm_linear,
        rope_kv,
        sampler,
        sampler_filter,
        split_linear,
        step_inputs,
    ]
    return {module.__name__: module for module in modules}


if __name__ == "__main__":
    main()
