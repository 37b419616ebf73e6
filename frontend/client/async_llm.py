"""AsyncLLM: an engine of its own behind asyncio, with vLLM's names. AsyncLLMEngine is vLLM's older name for it.

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs("path/to/model"))
    async for output in engine.generate("Hello", SamplingParams(max_tokens=32), request_id="0"):
        print(output.outputs[0].text)
    engine.shutdown()

For an engine that runs already, use AsyncClient (async_client.py), on which this is built. The connection belongs to the event
loop that uses it; when another loop uses the object later, it connects anew.
"""

import asyncio
import os
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any, Self

from quire.frontend.client.beam_search import BeamSearchOutput, BeamSearchParams, beam_search_output, search_all
from quire.frontend.client.client import Client
from quire.frontend.client.engine_args import EngineArgs, check_engine_args
from quire.frontend.client.lora_request import LoRARequest, add_lora, list_loras, pin_lora, remove_lora, terms_of
from quire.frontend.client.media_data import media_options
from quire.frontend.client.model_config import ModelConfig, VllmConfig, check_config, vllm_config
from quire.frontend.client.not_here import ENGINE_NAMES, check_options, check_reset, without
from quire.frontend.client.outputs import RequestOutput
from quire.frontend.client.own_engine import FORKED
from quire.frontend.client.pooling_outputs import PoolingRequestOutput
from quire.frontend.client.prompt import Prompt
from quire.frontend.client.stream import EngineDown
from quire.frontend.client.transformers_tokenizer import transformers_tokenizer
from quire.frontend.launcher import CoreProcess, engine_configs, launch_cores, stop_cores
from quire.frontend.replicas.replicas import client_of
from quire.ipc.messages.utilities import ProfileDone, ResetDone, ResetPrefixCache, StartProfile, StopProfile
from quire.ipc.pooling import PoolingParams
from quire.ipc.sampling import SamplingParams

_STOP_GRACE_S = 10.0


class AsyncLLM:
    """An engine of its own, or several (data_parallel_size). They end with `shutdown`, an `async with`, garbage collection, or
    the interpreter's exit."""

    def __init__(self, engine_args: EngineArgs | VllmConfig | None = None, **_: Any) -> None:
        """Start the engine and wait for it. Other arguments of vLLM's (log_stats, ...) have no effect. Raises EngineStartError
        with the engine's own text."""
        is_config = isinstance(engine_args, VllmConfig)
        name = type(self).__name__
        self._options = check_config(engine_args) if is_config else check_engine_args(name, engine_args).config
        self._media_options = media_options({} if isinstance(engine_args, VllmConfig) else vars(engine_args))
        cores = launch_cores(engine_configs(self._options))
        self._addresses = [core.address for core in cores]
        self._finalizer = weakref.finalize(self, _stop, cores, os.getpid())
        # the event loop in use, its client, and the generator that closes the connection when the loop's run ends
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: Client | None = None
        self._connection: AsyncGenerator[None, None] | None = None
        self._connecting = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None
        self._names: set[str] = set()  # of running requests
        self._tokenizer: Any = None  # transformers', once it has been asked for
        self._pid = os.getpid()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **_: Any) -> Self:
        """Other arguments of vLLM's (usage_context, stat_loggers, ...) are accepted and have no effect."""
        return cls(engine_args)

    @classmethod
    def from_vllm_config(cls, vllm_config: VllmConfig, **_: Any) -> Self:
        """vllm_config: what AsyncEngineArgs.create_engine_config returns."""
        check_config(vllm_config)
        return cls(vllm_config)

    async def _connected(self) -> Client:
        if not self._finalizer.alive:
            raise EngineDown("this AsyncLLM has been shut down")
        if os.getpid() != self._pid:
            raise EngineDown(FORKED)
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # the first time, or asyncio.run once more
            self._client, self._loop, self._connecting = client_of(self._addresses), loop, asyncio.Lock()
            self._client.media_options = self._media_options
            self._connection = None
        assert self._client is not None
        async with self._connecting:
            if self._connection is None:
                connection = _connection(self._client)
                await anext(connection)
                self._connection = connection
        return self._client

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str = "",
        *,
        priority: int = 0,
        cache_salt: str = "",
        lora_request: LoRARequest | None = None,
        **others: None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield RequestOutputs, cumulative unless output_kind says otherwise. Leaving the loop aborts the request.

        sampling_params None: the model's defaults. others: vLLM's options that must be None (not_here.py). Raises ClientErrors;
        ValueError for a request_id in use.
        """
        check_options("AsyncLLM.generate", others)
        client = await self._connected()
        if request_id in self._names:
            raise ValueError(f"request_id {request_id!r} is in use")
        self._names |= {request_id} - {""}
        outputs: AsyncIterator[RequestOutput] | None = None
        try:
            terms = await terms_of(client, lora_request)
            outputs = client.generate(
                prompt, sampling_params, request_id, priority=priority, cache_salt=cache_salt, terms=terms
            )
            async for output in outputs:
                output.lora_request = lora_request
                yield output
        finally:
            self._names.discard(request_id)
            if outputs is not None:
                await outputs.aclose()  # type: ignore[attr-defined]

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str = "",
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        **others: None,
    ) -> AsyncIterator[PoolingRequestOutput]:
        """Yield the prompt's vector or scores, once. others and errors: as for `generate`."""
        check_options("AsyncLLM.encode", others)
        client = await self._connected()
        terms = await terms_of(client, lora_request)
        async for output in client.encode(prompt, pooling_params, request_id, priority=priority, terms=terms):
            yield output

    async def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, lora_request: LoRARequest | None = None, **others: None
    ) -> BeamSearchOutput:
        """The most likely continuations, best first. Raises ClientErrors. others: as for `generate`."""
        check_options("AsyncLLM.beam_search", others)
        client = await self._connected()
        (found,) = await search_all(client, [prompt], params, lora_requests=[lora_request])
        return await asyncio.to_thread(beam_search_output, found, client._tokenizer)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort requests: their iterators end with the tokens so far. Unknown ids are ignored, as of ended requests."""
        client = await self._connected()
        for each in [request_id] if isinstance(request_id, str) else request_id:
            client.abort(each)

    async def get_tokenizer(self, lora_request: object = None) -> Any:
        """transformers' tokenizer of the model's files. The first call imports transformers."""
        client = await self._connected()
        if self._tokenizer is None:
            self._tokenizer = await asyncio.to_thread(transformers_tokenizer, self._options, client)
        return self._tokenizer

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter. False if it was there already. Raises InvalidRequest for one that cannot be used."""
        client = await self._connected()
        before = client.adapters.get(lora_request.lora_name)
        return await add_lora(client, lora_request) is not before

    async def remove_lora(self, lora_id: int | str) -> bool:
        """Unload an adapter, by its name or by the number of a LoRARequest; whether there was one."""
        return await remove_lora(await self._connected(), lora_id)

    async def list_loras(self) -> set[int]:
        """Numbers of the LoRARequests that have a loaded adapter."""
        return list_loras(await self._connected())

    async def pin_lora(self, lora_id: int | str) -> bool:
        """Keep an adapter on the device. False if there is none."""
        return await pin_lora(await self._connected(), lora_id)

    async def get_model_config(self) -> ModelConfig:
        return vllm_config(self._options, await self._connected()).model_config

    @property
    def vllm_config(self) -> VllmConfig:
        """The engine's configuration, as far as known. Raises EngineDown before the first call, such as get_model_config()."""
        if self._client is None:
            raise EngineDown("not connected yet: await get_model_config() first")
        return vllm_config(self._options, self._client)

    @property
    def model_config(self) -> ModelConfig:
        return self.vllm_config.model_config

    async def check_health(self) -> None:
        """Raises EngineDown, which says what is wrong, if the engine is not healthy."""
        if problem := (await self._connected()).health():
            raise EngineDown(problem)

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes. False if requests run: their blocks will be cached again."""
        check_reset(reset_running_requests)
        return (await (await self._connected()).utility(ResetPrefixCache(), ResetDone)).complete

    async def is_tracing_enabled(self) -> bool:
        return False

    async def do_log_stats(self) -> None:
        """vLLM's request to log figures now: the engine logs them by itself, with disable_log_stats=False."""

    async def reset_mm_cache(self) -> None:
        """vLLM's cache of images: there is none here, and nothing to forget."""

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Let every worker record a profile, for at most a thousand steps. Needs `profile_dir`."""
        await (await self._connected()).utility(StartProfile(), ProfileDone)

    async def stop_profile(self) -> list[str]:
        """Write the traces, one per rank, into `profile_dir`; returns the files' names."""
        return (await (await self._connected()).utility(StopProfile(), ProfileDone)).traces

    @property
    def is_running(self) -> bool:
        return self._finalizer.alive

    @property
    def is_stopped(self) -> bool:
        return not self._finalizer.alive

    @property
    def errored(self) -> bool:
        """Whether requests would fail now. An engine that has died is not restarted."""
        return self.is_stopped or (
            self._connection is not None and self._client is not None and self._client.health() is not None
        )

    def shutdown(self) -> None:
        """Abort all requests and end the engine, which takes a moment. May be called again."""
        if (
            self._loop is not None
            and self._loop is _running_loop()
            and self._client is not None
            and self._connection is not None
        ):
            self._client.abort_all()
            self._closing = self._loop.create_task(self._connection.aclose())
            self._connection = None
        self._finalizer()

    if not TYPE_CHECKING:  # type checkers must not know other names

        def __getattr__(self, name: str) -> Any:
            return without(self, name, ENGINE_NAMES)

    async def __aenter__(self) -> Self:
        await self._connected()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._connection is not None:
            await self._connection.aclose()
        elif self._closing is not None:  # `shutdown` was called inside the `async with`
            await asyncio.wait([self._closing])
        await asyncio.to_thread(self._finalizer)


AsyncLLMEngine = AsyncLLM


async def _connection(client: Client) -> AsyncGenerator[None, None]:
    """Connect, yield, and disconnect when the generator is closed, which asyncio.run does at its end."""
    try:
        await client.connect()
        yield
    finally:
        await client.close()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _stop(cores: list[CoreProcess], owner_pid: int) -> None:
    """Stop the cores; does nothing in a fork of the process that started them."""
    if os.getpid() == owner_pid:
        stop_cores(cores, _STOP_GRACE_S)
