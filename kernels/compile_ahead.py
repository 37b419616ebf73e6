"""Compile Triton kernels side by side before they are needed: one after the other they take most of a first start."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime.jit import JITFunction

MAX_THREADS = 16


@contextmanager
def compile_only() -> Iterator[None]:
    """Within, a kernel that is called is compiled by another thread and not run; leaving waits for all.

    What would have been computed is left as it was: results mean nothing. What cannot be compiled is said when it is called
    outside. Not for several threads at once.
    """
    run = JITFunction.run

    def compile_instead(self: JITFunction, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, warmup=True, **kwargs)
        if hasattr(kernel, "future") and kernel.future.done():
            kernel.result(ignore_errors=True)  # from now on Triton finds it at once
        return kernel

    with (
        ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        JITFunction.run = compile_instead
        try:
            yield
        finally:
            JITFunction.run = run
