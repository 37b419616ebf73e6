"""OwnEngine: the engines that an LLM or an LLMEngine starts for itself, and the event loop that their client runs on.

The engine is a child process, and the client runs in a thread of its own, so it works where an event loop runs already. All of
it ends with the object: by `shutdown`, garbage collection, or the interpreter's exit.
"""

import asyncio
import functools
import os
import re
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future, wait
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec
import uvloop

from quire.frontend.client.client import Client
from quire.frontend.client.engine_options import engine_options
from quire.frontend.client.processor_names import with_processor_names
from quire.frontend.client.stream import EngineDown
from quire.frontend.client.transformers_tokenizer import transformers_tokenizer
from quire.frontend.launcher import CoreProcess, EngineStartError, engine_configs, launch_cores, stop_cores
from quire.frontend.replicas.replicas import client_of
from quire.ipc.config import EngineConfig
from quire.ipc.lora_flags import ANY_OWNER
from quire.ipc.process.children import CORE_MODULE
from quire.ipc.sampling import SamplingParams
from quire.ipc.unknown_names import what_to_write

_CANCEL_S = 5.0  # to abort interrupted requests
_NOT_FOR_LLM = ("listen", "curve_secret_key_file", "curve_allow_file")  # options without use here: not suggested

FORKED = (
    "this engine belongs to the process that started it, and cannot be used in a fork of it: use it there, start an engine in "
    "the child, or share one by `quire serve` or `enginecore` and AsyncClient"
)

_MODEL = "the model comes first: {of}('folder or hub id')"
_OTHER_OPTIONS = dict.fromkeys(("model_path", "model_name", "model_id", "pretrained_model_name_or_path"), _MODEL) | {
    "rope_scaling": "it replaces a field of config.json: {of}(hf_overrides={{'rope_scaling': ...}})",
    "rope_theta": "it replaces a field of config.json: {of}(hf_overrides={{'rope_theta': ...}})",
    "log_stats": "use disable_log_stats",
    "engine_args": "{of}.from_engine_args(EngineArgs(...)) takes them",
    "torch_dtype": "use dtype",
    "max_length": "use max_model_len",
    "device_map": "use tensor_parallel_size for several GPUs, and device='cpu' without one",
    "load_in_4bit": "use quantization='bitsandbytes'",
    "load_in_8bit": "use quantization='int8'",
    "gpu_memory_fraction": "use gpu_memory_utilization",
    "tp_size": "use tensor_parallel_size",
}
_FROM_ARGS = "; LLM.from_engine_args and LLMEngine.from_engine_args take an EngineArgs"

T = TypeVar("T")


class OwnEngine:
    """One engine, or several (data_parallel_size), and their client. Methods may be called from several threads at once.

    module: what the engine's process runs. Raises EngineStartError with the engine's own text.
    """

    def __init__(self, options: EngineConfig, module: str = CORE_MODULE) -> None:
        self.options = options
        try:
            self.background = Background(launch_cores(engine_configs(options), module))
        except EngineStartError as error:
            raise EngineStartError(_in_words_of_python(str(error))) from None
        self.shutdown = weakref.finalize(self, self.background.close, os.getpid())  # may be called again
        try:
            self.run(self.background.client.connect())
        except BaseException:  # includes Ctrl-C: raised again, and no engine is left running
            self.shutdown()
            raise

    @functools.cached_property
    def tokenizer(self) -> Any:
        """transformers' tokenizer of the model (transformers_tokenizer.py)."""
        return transformers_tokenizer(self.options, self.client)

    @property
    def client(self) -> Client:
        """Raises EngineDown after a shutdown."""
        if not self.shutdown.alive:
            raise EngineDown("this LLM has been shut down")
        return self.background.client

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the client's event loop, from another thread, and wait."""
        return self.background.run(work)


class Background:
    """The engines, the event loop's thread and the client: everything that must be closed. Has no reference to OwnEngine."""

    def __init__(self, cores: list[CoreProcess]) -> None:
        self.client = client_of([core.address for core in cores], hold_s=0.0)  # none is started again
        self._cores = cores
        self._pid = os.getpid()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="quire-llm", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the loop, from another thread, and wait. Ctrl-C cancels the work, and is raised once that has ended.

        Raises EngineDown in a fork of the process that made this object: the loop's thread is not in it.
        """
        if os.getpid() != self._pid:
            work.close()
            raise EngineDown(FORKED)
        result: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(lambda task: _copy_result(task, result))

        self._loop.call_soon_threadsafe(start)
        try:
            return result.result()
        except BaseException:  # Ctrl-C, or the work's own error: raised again when the work has ended
            if not result.done():
                self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
                wait([result], timeout=_CANCEL_S)
            raise

    def close(self, owner_pid: int) -> None:
        """Abort requests, end the engines and the thread. Does nothing in a fork of the process that made this object."""
        if os.getpid() != owner_pid:
            return
        if threading.current_thread() is self._thread:  # called by a garbage collection in that thread
            threading.Thread(target=self._close, name="quire-llm-close").start()
        else:
            self._close()

    def _close(self) -> None:
        try:
            self.run(self.client.close())
        finally:
            stop_cores(self._cores, grace_s=10.0)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


def _copy_result(task: asyncio.Task[T], result: Future[T]) -> None:
    if task.cancelled():
        result.set_exception(CancelledError())
    elif (error := task.exception()) is not None:
        result.set_exception(error)
    else:
        result.set_result(task.result())


def engine_config(model: str | os.PathLike[str] | None, options: dict[str, Any], of: str = "LLM") -> EngineConfig:
    """EngineConfig from the arguments of LLM, or of the class that `of` names. Raises ValueError."""
    names, options = EngineConfig.__struct_fields__, engine_options(options)
    for name in options:
        if name not in names:
            public = [n for n in names if n not in _NOT_FOR_LLM]
            raise ValueError(f"{of} has no option {name!r}; {what_to_write(name, public, _elsewhere(of))}")
    if not isinstance(model, str | os.PathLike | None):
        raise ValueError(f"{of}: model must be a folder or hub id, got {type(model).__name__}{_FROM_ARGS}")
    options = with_processor_names(options)
    if options.get("enable_lora") and not options.get("lora_dirs"):  # the caller names folders and hub ids, in LoRARequests
        options |= {"lora_dirs": ["/"], "lora_hub": options.get("lora_hub") or [ANY_OWNER]}
    values = {"disable_log_stats": True, **options, "model": None if model is None else os.fspath(model)}
    if isinstance(values.get("served_model_name"), str):
        values["served_model_name"] = [values["served_model_name"]]
    try:
        return msgspec.convert(values, EngineConfig)
    except msgspec.ValidationError as error:
        raise ValueError(_in_words_of_python(str(error))) from None


def _elsewhere(of: str) -> dict[str, str]:
    """Hints about what to write instead of options that other engines, or requests, have."""
    of_requests = {name: f"it is a request's: SamplingParams({name}=...)" for name in SamplingParams.__struct_fields__}
    return of_requests | {name: text.format(of=of) for name, text in _OTHER_OPTIONS.items()}


def _in_words_of_python(text: str) -> str:
    """Rewrite an error of msgspec or about a flag as one about an argument of LLM."""
    what, _, path = text.partition(" - at `$.")
    if path:
        name = path.rstrip("`")
        what = f"{name}: {what[:1].lower()}{what[1:]}".replace("| null", "or None").replace("`", "")
        if "invalid enum value" in what:
            what += f"; there are {', '.join(map(str, get_args(get_type_hints(EngineConfig).get(name))))}"
    return re.sub(r"--([a-z][a-z-]+)", lambda flag: flag[1].replace("-", "_"), what)
