"""Compile Triton kernels side by side before they are needed: one after the other they take most of a first start."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

MAX_THREADS = 16


@contextmanager
def compile_only() -> Iterator[None]:
    """Within, a kernel that is called is compiled by another thread and not run; leaving waits for all.

    What would have been computed is left as it was: results mean nothing. What cannot be compiled is said when it is called
    outside. Not for several threads at once.
    """
    run, kernels = JITFunction.run, []

    def compile_instead(self: JITFunction, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, warmup=True, **kwargs)
        if hasattr(kernel, "future"):
            kernels.append(kernel)
            if kernel.future.done():
                kernel.result(ignore_errors=True)  # from now on Triton finds it at once
        return kernel

    threads = min(MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),)) as pool:
        with triton.AsyncCompileMode(pool, ignore_errors=True):
            JITFunction.run = compile_instead
            try:
                yield
            finally:
                JITFunction.run = run
        # What launches a kernel is compiled as well, in C, when it is first asked for.
        found = {id(kernel): kernel for future in kernels if (kernel := future.result(ignore_errors=True)) is not None}
        list(pool.map(lambda kernel: kernel.run, found.values()))
