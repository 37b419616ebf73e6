"""Compile Triton kernels in parallel before they are needed: one after the other they take most of a first start."""

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
    """Triton's own mode of compiling in threads; a kernel that is not in its cache is compiled in another process first."""

    def __init__(self, pool: ThreadPoolExecutor, processes: CompileProcesses | None) -> None:
        super().__init__(pool, ignore_errors=True)
        self.processes = processes
        self.job: Job | None = None  # the kernel for which `submit` is called next

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

    Outputs are left unwritten, so results mean nothing. A kernel that cannot be compiled raises its error when it is called
    outside. Must not be used by several threads at once.
    """
    read_triton()
    run, kernels = JITFunction.run, []
    describe: Any = getattr(JITFunction, "_do_compile", None)  # for a known Triton
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
    """Within, several threads may load Triton's compiled launchers; False if this Triton does not allow that.

    All are extension modules of one name. Python does not load a file again that was loaded before: it returns the newest
    module of that name, with the file's functions put in, so that a thread would find another thread's launcher there.
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
    """Whether Triton has compiled this before, by the file that it looks for itself; True also if it does not use its cache."""
    if triton.knobs.compilation.always_compile:
        return True
    try:
        return get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(f"{name[:150]}.json") is not None
    except OSError:  # the cache is unusable: reported when the kernel is compiled
        return True


def _take_result(kernel: Any) -> None:
    """Take the kernel's result if it is compiled, so that Triton finds it at once."""
    future = kernel.future  # None once Triton 3.9 has taken its result
    if future is not None and future.done() and future.exception() is None:
        kernel.result()


def _make_launcher(kernel: Any) -> None:
    """Make the kernel's launcher, which is compiled, too, in C, when it is first used."""
    try:
        kernel.run  # noqa: B018
    except Exception:  # of compiler, linker or driver: raised again by the kernel's launch
        log.debug("a kernel's launcher cannot be made", exc_info=True)
