"""LLMEngine: add requests one by one, and call `step` for their outputs, with vLLM's names.

    engine = LLMEngine.from_engine_args(EngineArgs("path/to/model"))
    engine.add_request("0", "Hello", SamplingParams(max_tokens=32))
    while engine.has_unfinished_requests():
        for output in engine.step():
            print(output.request_id, output.outputs[0].text)

The engine runs by itself, in its own process: `step` only waits for new outputs. `LLM.llm_engine` is one, for an LLM's engine.
"""

import asyncio
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self

from quire.frontend.client.engine_args import EngineArgs
from quire.frontend.client.model_config import ModelConfig, VllmConfig, vllm_config
from quire.frontend.client.not_here import ENGINE_NAMES, check_options, check_reset, without
from quire.frontend.client.outputs import RequestOutput
from quire.frontend.client.own_engine import OwnEngine
from quire.frontend.client.prompt import Prompt
from quire.frontend.client.request_outputs import merged
from quire.ipc.messages.stats import CacheInfo
from quire.ipc.messages.utilities import ResetDone, ResetPrefixCache
from quire.ipc.sampling import SamplingParams


class LLMEngine:
    """An engine of its own. Methods may be called from any thread, but from one at a time."""

    def __init__(self, engine_args: EngineArgs | OwnEngine) -> None:
        """Raises EngineStartError with the engine's own text."""
        if isinstance(engine_args, EngineArgs):
            engine_args = OwnEngine(engine_args.create_engine_config())
        self._own: OwnEngine = engine_args
        self._changed = threading.Condition()  # guards the fields below, which the event loop's thread writes, too
        self._running: dict[str, asyncio.Task[None]] = {}
        self._news: dict[str, RequestOutput] = {}  # each request's latest output, until a step takes it
        self._errors: list[Exception] = []

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **_: Any) -> Self:
        """Other arguments of vLLM's (usage_context, stat_loggers, ...) are accepted and have no effect."""
        return cls(engine_args)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: None = None,
        *,
        priority: int = 0,
        **others: None,
    ) -> None:
        """Begin a request. Raises ValueError for an id in use, and the errors of `LLM.generate`.

        arrival_time is accepted and not used: the request arrives now. others: vLLM's options that must be None (not_here.py).
        """
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, got {type(request_id).__name__}")
        check_options("LLMEngine.add_request", {"lora_request": lora_request, **others})
        self._own.run(self._begin(request_id, prompt, params, priority))

    async def _begin(self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int) -> None:
        client = self._own.client
        text, ids, salt = await client._resolve(prompt)
        client._check_prompt(ids)
        client._check_params(params, len(ids))
        with self._changed:
            if request_id in self._running or request_id in self._news:
                raise ValueError(f"request_id {request_id!r} is in use")
            prompt = {"prompt": text, "prompt_token_ids": ids, "cache_salt": salt}
            task = asyncio.create_task(self._run(request_id, prompt, params.clone(), priority))
            self._running[request_id] = task
        await asyncio.sleep(0)  # sends the request

    async def _run(self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int) -> None:
        try:
            async for output in self._own.client.generate(prompt, params, request_id, priority=priority):
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

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Abort requests, without further outputs. Unknown ids are ignored, as of ended requests."""
        with self._changed:
            for each in [request_id] if isinstance(request_id, str) else list(request_id):
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

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer of the model's files. The first call imports transformers."""
        return self._own.tokenizer

    @property
    def tokenizer(self) -> Any:
        return self._own.tokenizer

    @property
    def vllm_config(self) -> VllmConfig:
        """The engine's configuration, as far as it is known, under vLLM's names."""
        return vllm_config(self._own.options, self._own.client)

    @property
    def model_config(self) -> ModelConfig:
        return self.vllm_config.model_config

    @property
    def cache_config(self) -> CacheInfo | None:
        return self.vllm_config.cache_config

    if not TYPE_CHECKING:  # type checkers must not know other names

        def __getattr__(self, name: str) -> Any:
            raise without(self, name, ENGINE_NAMES)

    def shutdown(self) -> None:
        """End the engine and free its memory. May be called again."""
        self._own.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
