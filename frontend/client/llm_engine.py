"""LLMEngine: add requests one by one, and call `step` for their outputs, with vLLM's names.

    engine = LLMEngine.from_engine_args(EngineArgs("path/to/model"))
    engine.add_request("0", "Hello", SamplingParams(max_tokens=32))
    while engine.has_unfinished_requests():
        for output in engine.step():
            print(output.request_id, output.outputs[0].text)

The engine runs by itself, in its own process: `step` only waits for new outputs. `LLM.llm_engine` is one, for an LLM's engine.
"""

import asyncio
import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Self, TypeVar

from quire.frontend.client.engine_args import EngineArgs, check_engine_args
from quire.frontend.client.engine_metrics import Metric, engine_metrics
from quire.frontend.client.lora_request import LoRARequest, add_lora, list_loras, pin_lora, remove_lora, terms_of
from quire.frontend.client.media_data import media_options
from quire.frontend.client.model_config import (
    CacheConfig,
    DeviceConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
    check_config,
    vllm_config,
)
from quire.frontend.client.not_here import ENGINE_NAMES, check_options, check_reset, without
from quire.frontend.client.outputs import RequestOutput
from quire.frontend.client.own_engine import OwnEngine
from quire.frontend.client.prompt import Prompt
from quire.frontend.client.request_outputs import merged
from quire.frontend.client.stream import EngineDown
from quire.frontend.client.terms import Terms
from quire.ipc.messages.utilities import ProfileDone, ResetDone, ResetPrefixCache, StartProfile, StopProfile
from quire.ipc.sampling import SamplingParams
from quire.ipc.speculative_config import SpeculativeConfig

T = TypeVar("T")


class LLMEngine:
    """An engine of its own. Methods may be called from any thread, but from one at a time."""

    def __init__(self, engine_args: EngineArgs | VllmConfig | OwnEngine | None = None, **_: Any) -> None:
        """Other arguments of vLLM's (log_stats, ...) have no effect. Raises EngineStartError with the engine's own text."""
        if isinstance(engine_args, VllmConfig):
            engine_args = OwnEngine(check_config(engine_args))
        elif not isinstance(engine_args, OwnEngine):
            given = check_engine_args(type(self).__name__, engine_args)
            engine_args = own = OwnEngine(given.config)
            own.client.media_options = media_options(vars(given))
        self._own: OwnEngine = engine_args
        self._changed = threading.Condition()  # guards the fields below, which the event loop's thread writes, too
        self._running: dict[str, asyncio.Task[None]] = {}
        self._news: dict[str, RequestOutput] = {}  # each request's latest output, until a step takes it
        self._errors: list[Exception] = []

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **_: Any) -> Self:
        """Other arguments of vLLM's (usage_context, stat_loggers, ...) are accepted and have no effect."""
        return cls(engine_args)

    @classmethod
    def from_vllm_config(cls, vllm_config: VllmConfig, **_: Any) -> Self:
        """vllm_config: what EngineArgs.create_engine_config returns."""
        return cls(OwnEngine(check_config(vllm_config)))

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | None = None,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        *older: Any,
        priority: int = 0,
        sampling_params: SamplingParams | None = None,
        **others: None,
    ) -> None:
        """Begin a request. Raises ValueError for an id in use, and the errors of `LLM.generate`.

        sampling_params: another name for params; without either, the model's defaults. arrival_time is accepted and not used:
        the request arrives now. others: vLLM's options that must be None (not_here.py).
        """
        if not isinstance(request_id, str):
            raise ValueError(f"request_id must be a string, got {type(request_id).__name__}")
        names = ("tokenization_kwargs", "trace_headers", "priority")
        if len(older) > len(names):
            raise ValueError("LLMEngine.add_request takes a request_id, a prompt and params; give all other arguments by name")
        others |= dict(zip(names, older, strict=False))
        priority = others.pop("priority", None) or priority
        check_options("LLMEngine.add_request", others)
        params = params if params is not None else sampling_params
        if params is None:
            params = self._own.client.default_sampling_params()
        self._own.run(self._begin(request_id, prompt, params, priority, lora_request))  # type: ignore[arg-type]  # None is refused there

    async def _begin(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int, lora: LoRARequest | None
    ) -> None:
        client = self._own.client
        given = await client.resolve(prompt)
        ids = given.ids or ()
        client._check_prompt(ids)
        client._check_params(params, len(ids))
        terms = await terms_of(client, lora)
        with self._changed:
            if request_id in self._running or request_id in self._news:
                raise ValueError(f"request_id {request_id!r} is in use")
            if not given.media:  # images are looked up again, and known
                prompt = {"prompt": given.text, "prompt_token_ids": ids, "cache_salt": given.cache_salt, "marks": given.marks}
            task = asyncio.create_task(self._run(request_id, prompt, params.clone(), priority, terms, lora))
            self._running[request_id] = task
        await asyncio.sleep(0)  # sends the request

    async def _run(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int, terms: Terms, lora: LoRARequest | None
    ) -> None:
        try:
            async for output in self._own.client.generate(prompt, params, request_id, priority=priority, terms=terms):
                output.lora_request = lora
                with self._changed:
                    if request_id in self._running:  # not aborted meanwhile
                        self._news[request_id] = merged(self._news.get(request_id), output, params)
                        self._changed.notify_all()
        except Exception as error:  # `step` raises it
            with self._changed:
                self._errors.append(error)
        finally:
            with self._changed:
                self._running.pop(request_id, None)
                self._changed.notify_all()

    def step(self) -> list[RequestOutput]:
        """Wait for requests with new tokens or an end; returns the latest output of each (by its output_kind). [] if no request
        is left.

        Raises the error of a failed request, one per call; other requests' outputs wait for the next call.
        """
        with self._changed:
            while not self._news and not self._errors and self._running:
                self._changed.wait()
            if self._errors:
                raise self._errors.pop(0)
            news, self._news = self._news, {}
            return list(news.values())

    def abort_request(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Abort requests, without further outputs. Unknown ids are ignored, as of ended requests."""
        ids = list(request_id) if isinstance(request_id, Iterable) and not isinstance(request_id, str) else [request_id]
        with self._changed:
            for each in ids:
                self._news.pop(each, None)
                if (task := self._running.pop(each, None)) is not None:
                    task.get_loop().call_soon_threadsafe(task.cancel)
            self._changed.notify_all()

    def get_num_unfinished_requests(self) -> int:
        with self._changed:
            return len(self._running.keys() | self._news.keys()) + len(self._errors)

    def has_unfinished_requests(self) -> bool:
        """Whether a step would return or raise something, now or later."""
        return self.get_num_unfinished_requests() > 0

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes. False if requests run: their blocks will be cached again."""
        check_reset(reset_running_requests)
        return self._own.run(self._own.client.utility(ResetPrefixCache(), ResetDone)).complete

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter. False if it was there already. Raises InvalidRequest for one that cannot be used."""
        before = self._own.client.adapters.get(lora_request.lora_name)
        return self._own.run(add_lora(self._own.client, lora_request)) is not before

    def remove_lora(self, lora_id: int | str) -> bool:
        """Unload an adapter, by its name or by the number of a LoRARequest; whether there was one."""
        return self._own.run(remove_lora(self._own.client, lora_id))

    def list_loras(self) -> set[int]:
        """Numbers of the LoRARequests that have a loaded adapter."""
        return list_loras(self._own.client)

    def pin_lora(self, lora_id: int | str) -> bool:
        """Keep an adapter on the device. False if there is none."""
        return self._own.run(pin_lora(self._own.client, lora_id))

    def get_tokenizer(self, lora_request: object = None) -> Any:
        """transformers' tokenizer of the model's files. The first call imports transformers."""
        return self._own.tokenizer

    @property
    def tokenizer(self) -> Any:
        """The same, with itself as its attribute `tokenizer`, by which older scripts reach it."""
        found = self._own.tokenizer
        found.tokenizer = found
        found.get_lora_tokenizer = lambda lora_request=None: found
        return found

    def get_tokenizer_group(self) -> Any:
        return self.tokenizer

    def check_health(self) -> None:
        """Raises EngineDown, which says what is wrong, if the engine is not healthy."""
        if problem := self._own.client.health():
            raise EngineDown(problem)

    def do_log_stats(self) -> None:
        """vLLM's request to log figures now: the engine logs them by itself, with disable_log_stats=False."""

    def is_tracing_enabled(self) -> bool:
        return False

    def get_metrics(self) -> list[Metric]:
        """Figures of the engine, at most half a second old, by the names of /metrics (engine_metrics.py)."""
        return engine_metrics(self._own.client)

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Let workers record a profile, for at most a thousand steps. Needs `profile_dir`; profile_prefix has no effect."""
        self._own.run(self._own.client.utility(StartProfile(), ProfileDone))

    def stop_profile(self) -> list[str]:
        """Write the traces, one per rank, into `profile_dir`; returns the files' names."""
        return self._own.run(self._own.client.utility(StopProfile(), ProfileDone)).traces

    def reset_mm_cache(self) -> None:
        """vLLM's cache of images: there is none here, and nothing to forget."""

    @property
    def vllm_config(self) -> VllmConfig:
        """The engine's configuration, as far as it is known, under vLLM's names."""
        return vllm_config(self._own.options, self._own.client)

    @property
    def model_config(self) -> ModelConfig:
        return self.vllm_config.model_config

    def get_model_config(self) -> ModelConfig:
        return self.model_config

    @property
    def cache_config(self) -> CacheConfig | None:
        return self.vllm_config.cache_config

    @property
    def scheduler_config(self) -> SchedulerConfig:
        return self.vllm_config.scheduler_config

    def get_scheduler_config(self) -> SchedulerConfig:
        return self.scheduler_config

    @property
    def parallel_config(self) -> ParallelConfig:
        return self.vllm_config.parallel_config

    def get_parallel_config(self) -> ParallelConfig:
        return self.parallel_config

    @property
    def device_config(self) -> DeviceConfig:
        return self.vllm_config.device_config

    @property
    def load_config(self) -> LoadConfig:
        return self.vllm_config.load_config

    # vLLM's configurations of what is not here
    lora_config = prompt_adapter_config = None

    @property
    def speculative_config(self) -> SpeculativeConfig | None:
        return self._own.options.speculative_config

    @property
    def log_stats(self) -> bool:
        """Whether the engine logs its figures."""
        return not self._own.options.disable_log_stats

    def get_supported_tasks(self) -> tuple[str, ...]:
        """The tasks that this model can be asked for, by vLLM's names."""
        return ("generate",)

    def has_unfinished_requests_for_virtual_engine(self, virtual_engine: int = 0) -> bool:
        return self.has_unfinished_requests()

    @classmethod
    def validate_output(cls, output: object, output_type: type[T]) -> T:
        """vLLM's check of an output's class. Raises ValueError."""
        if not isinstance(output, output_type):
            raise ValueError(f"expected an output of type {output_type.__name__}, got {type(output).__name__}")
        return output

    @classmethod
    def validate_outputs(cls, outputs: Iterable[object], output_type: type[T]) -> list[T]:
        """The outputs, each checked. Raises ValueError."""
        return [cls.validate_output(each, output_type) for each in outputs]

    @classmethod
    @contextlib.contextmanager
    def enable_output_validation(cls) -> Iterator[None]:
        """vLLM's context that checks classes of outputs: no effect."""
        yield

    if not TYPE_CHECKING:  # type checkers must not know other names

        def __getattr__(self, name: str) -> Any:
            return without(self, name, ENGINE_NAMES)

    def __delattr__(self, name: str) -> None:
        """`del engine.model_executor` and such are vLLM's ways of freeing memory: `shutdown` does it."""
        if name in self.__dict__:
            object.__delattr__(self, name)
        elif not hasattr(type(self), name):
            without(self, name, ENGINE_NAMES)

    def shutdown(self) -> None:
        """End the engine and free its memory. May be called again."""
        self._own.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
