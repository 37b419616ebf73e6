"""Compile Triton kernels side by side before they are needed: one after the other they take most of a first start."""

import hashlib
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.runtime import build
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction

from quire.kernels.triton_support import hopper
from quire.kernels.triton_support.compile_process import CompileProcesses, Job
from quire.kernels.triton_support.triton_key import read_triton

log = logging.getLogger("quire.kernels")

MAX_THREADS = 16
MAX_PROCESSES = 8  # each takes some 300 MB while it runs


class _Mode(triton.AsyncCompileMode):
    """Triton's own way to compile in threads; a kernel that is not in its cache is compiled in another process first."""

    def __init__(self, pool: ThreadPoolExecutor, processes: CompileProcesses | None) -> None:
        super().__init__(pool, ignore_errors=True)
        self.processes = processes
        self.job: Job | None = None  # what `submit`, called next, is about

    def submit(self, key: str, compile_fn: Any, finalize_fn: Any) -> Any:
        job, processes = self.job, self.processes
        if job is None or processes is None or _is_cached(key, job.name):
            return super().submit(key, compile_fn, finalize_fn)
        if key not in self.future_kernels:
            processes.announce()
        return super().submit(key, lambda: processes.compile(job, compile_fn), finalize_fn)


@contextmanager
def compile_only(num_threads: int = MAX_THREADS) -> Iterator[None]:
    """Within, a kernel that is called is compiled by another thread and not run; leaving waits for all of them.

    What would have been computed is left as it was: results mean nothing. What cannot be compiled is said when it is called
    outside. Not for several threads at once.
    """
    read_triton()
    run, kernels = JITFunction.run, []
    describe: Any = getattr(JITFunction, "_do_compile", None)  # of a Triton that is known
    threads = max(1, min(MAX_THREADS, num_threads))
    pool = ThreadPoolExecutor(threads, initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),))
    processes = CompileProcesses(min(MAX_PROCESSES, num_threads // 2)) if hopper.is_known_triton() else None

    def describe_first(self: JITFunction, key: Any, signature: Any, device: int, constexprs: Any, *rest: Any) -> Any:
        (options, attrs, *_), target = rest, self.device_caches[device][2]
        names = (self.fn.__module__, self.fn.__name__)
        mode.job = Job(*names, signature, constexprs, attrs, vars(options), (target.backend, target.arch, target.warp_size))
        return describe(self, key, signature, device, constexprs, *rest)

    def compile_instead(self: JITFunction, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, warmup=True, **kwargs)
        if hasattr(kernel, "future"):
            kernels.append(kernel)
            _take_result(kernel)
        return kernel

    with pool:
        with processes or nullcontext(), _Mode(pool, processes) as mode:
            JITFunction.run = compile_instead
            if processes is not None:
                JITFunction._do_compile = describe_first
            try:
                yield
            finally:
                JITFunction.run = run
                if processes is not None:
                    JITFunction._do_compile = describe
        found = {id(kernel): kernel for future in kernels if (kernel := future.result(ignore_errors=True)) is not None}
        with own_modules() as may_load:
            list((pool.map if may_load else map)(_make_launcher, found.values()))


@contextmanager
def own_modules() -> Iterator[bool]:
    """Within, Triton's compiled launchers may be loaded by several threads; False if that cannot be had from this Triton.

    All are extension modules of one name. A file that was loaded before is not loaded again: Python gives the newest module of
    that name, with the file's functions put in, so that a thread would find another thread's launcher there.
    """
    load, lock = getattr(build, "_load_module_from_path", None), threading.Lock()
    if load is None:
        yield False
        return

    def load_alone(name: str, path: str) -> Any:
        with lock:
            return SimpleNamespace(**vars(load(name, path)))

    build._load_module_from_path = load_alone
    try:
        yield True
    finally:
        build._load_module_from_path = load


def _is_cached(key: str, name: str) -> bool:
    """Whether Triton has compiled this before, for which it looks at the same file; also if it has no use for its cache."""
    if triton.knobs.compilation.always_compile:
        return True
    try:
        return get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(f"{name[:150]}.json") is not None
    except OSError:  # it cannot be had: said when the kernel is compiled
        return True


def _take_result(kernel: Any) -> None:
    """From now on Triton finds the kernel at once, if it is compiled."""
    future = kernel.future  # None once Triton 3.9 has taken its result
    if future is not None and future.done() and future.exception() is None:
        kernel.result()


def _make_launcher(kernel: Any) -> None:
    """What launches a kernel is compiled as well, in C, when it is first asked for."""
    try:
        kernel.run  # noqa: B018
    except Exception:  # the compiler's, the linker's, the driver's: said again, to whom it concerns, by the kernel's launch
        log.debug("a kernel's launcher cannot be made", exc_info=True)
