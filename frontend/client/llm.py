"""LLM: offline generation from a Python script or notebook, with vLLM's shapes and names.

    from quire import LLM, SamplingParams
    with LLM("path/to/model", max_model_len=4096) as llm:
        for output in llm.generate(["Hello", "Once upon a time"], SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

The engine is a child process, the client lives on an event loop in a thread of its own: so it works where a loop is running
already. All of it ends with the object: `shutdown`, the end of a `with`, garbage collection, or the interpreter's exit.
"""

import asyncio
import difflib
import os
import re
import threading
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import msgspec
import uvloop

from quire.frontend.client.batch import run_batch
from quire.frontend.client.beam_search import BeamSearchOutput, BeamSearchParams, beam_search_output, search_all
from quire.frontend.client.client import Client
from quire.frontend.client.engine_options import engine_options
from quire.frontend.client.not_here import LLM_METHODS, check_options
from quire.frontend.client.outputs import RequestOutput
from quire.frontend.client.processor_names import with_processor_names
from quire.frontend.client.prompt import Prompt
from quire.frontend.client.stream import EngineDown
from quire.frontend.launcher import CoreProcess, EngineStartError, engine_configs, launch_cores, stop_cores
from quire.frontend.replicas import client_of
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.config import EngineConfig
from quire.ipc.process.children import CORE_MODULE
from quire.ipc.sampling import SamplingParams
from quire.ipc.utilities import ProfileDone, ResetDone, ResetPrefixCache, StartProfile, StopProfile

__all__ = ["LLM", "SamplingParams"]

_CANCEL_S = 5.0  # for interrupted requests to be aborted
_NOT_FOR_LLM = ("listen", "curve_secret_key_file", "curve_allow_file")  # options that nobody needs here: not suggested

T = TypeVar("T")
Conversation = list[dict[str, Any]]


class LLM:
    """An engine of its own, or several (data_parallel_size), and a blocking interface. Methods may be called from any thread,
    also at once.

    model: folder or hub id; None: the bundled model. options: fields of EngineConfig. Raises TypeError for an unknown option,
    ValueError for a bad value, EngineStartError with the engine's own words.
    """

    engine_module = CORE_MODULE  # what runs as the engine's process

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Any) -> None:
        config = engine_config(model, options)
        try:
            self._background = _Background(launch_cores(engine_configs(config), self.engine_module))
        except EngineStartError as error:
            raise EngineStartError(_in_words_of_python(str(error))) from None
        self._finalizer = weakref.finalize(self, self._background.close, os.getpid())
        try:
            self._background.run(self._background.client.connect())
        except BaseException:  # Ctrl-C, too: passed on, without an engine left running
            self._finalizer()
            raise

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> Self:
        """engine_args: an EngineArgs (engine_args.py)."""
        return cls(engine_args.model, **engine_args.options)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        **others: None,
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts.

        prompts: one prompt or a list of them; a prompt is a text, a list of token ids, a TextPrompt or a TokensPrompt, which
        are dicts. sampling_params: one for all or one each; None: the model's defaults. priority: one each, lower runs first;
        needs scheduling_policy="priority". Raises TypeError or ValueError for a prompt or parameter that cannot be run (then
        nothing is), EngineDown if the engine is lost. Ctrl-C aborts the requests. others: vLLM's, None (not_here.py).
        """
        check_options("LLM.generate", others)
        batch = _prompt_list(prompts)
        params = self._params(sampling_params, len(batch))
        if priority is not None and len(priority) != len(batch):
            raise ValueError(f"there are {len(batch)} prompts and {len(priority)} priorities")
        return self._background.run(run_batch(self._client, batch, params, priority, use_tqdm))

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        chat_template_content_format: Literal["auto", "string", "openai"] = "auto",
        **others: None,
    ) -> list[RequestOutput]:
        """`generate` for one conversation or a list of them, rendered with the model's chat template or `chat_template`."""
        check_options("LLM.chat", {"lora_request": lora_request, **others})
        if chat_template_content_format not in ("auto", "string", "openai"):
            raise ValueError(f"chat_template_content_format is auto, string or openai, not {chat_template_content_format!r}")
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
            kind = type(messages).__name__
            raise TypeError(f"messages must be a list of messages, or a list of such lists, got {kind}")
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        tokenizer = self.get_tokenizer()
        texts = [
            tokenizer.render_chat(
                list(conversation) if isinstance(conversation, tuple) else conversation,  # type: ignore[arg-type]
                tools=tools,
                documents=documents,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
                chat_template_content_format=chat_template_content_format,
            )
            for conversation in conversations
        ]
        rows = tokenizer.encode_batch(texts, add_special_tokens=False)
        prompts = [{"prompt": text, "prompt_token_ids": ids} for text, ids in zip(texts, rows, strict=True)]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt, best first. concurrency_limit: prompts at once, None: 16.

        Prompts and errors as for `generate`.
        """
        work = search_all(self._client, _prompt_list(prompts), params, concurrency_limit, use_tqdm)
        return [beam_search_output(each, self._client._tokenizer) for each in self._background.run(work)]

    def get_tokenizer(self) -> Tokenizer:
        return self._client.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams with the model's own defaults, from generation_config.json."""
        return self._client.default_sampling_params()

    def start_profile(self) -> None:
        """Let every worker record what it does, for at most a thousand steps. Needs `profile_dir`."""
        self._background.run(self._client.utility(StartProfile(), ProfileDone))

    def stop_profile(self) -> list[str]:
        """Write the traces, one a rank, into `profile_dir`; returns the files' names."""
        return self._background.run(self._client.utility(StopProfile(), ProfileDone)).traces

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False if requests run, whose blocks will be cached again."""
        return self._background.run(self._client.utility(ResetPrefixCache(), ResetDone)).complete

    def shutdown(self) -> None:
        """End the engine and free what it holds. May be called again; afterwards `generate` raises EngineDown."""
        self._finalizer()

    if not TYPE_CHECKING:  # where names that are not here must stay unknown

        def __getattr__(self, name: str) -> Any:
            why = f": {LLM_METHODS[name]}" if name in LLM_METHODS else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{why}", name=name, obj=self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def _client(self) -> Client:
        if not self._finalizer.alive:
            raise EngineDown("this LLM has been shut down")
        return self._background.client

    def _params(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        if isinstance(params, str | Mapping) or not isinstance(params, Sequence):
            raise TypeError(f"sampling_params must be SamplingParams or a list of them, got {type(params).__name__}")
        if len(params) != count:
            raise ValueError(f"there are {count} prompts and {len(params)} sampling_params")
        return list(params)


class _Background:
    """The engines, the event loop's thread and the client: everything of an LLM that must be put away. Knows no LLM."""

    def __init__(self, cores: list[CoreProcess]) -> None:
        self.client = client_of([core.address for core in cores])
        self._cores = cores
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="quire-llm", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the loop, from another thread, and wait. An interrupt cancels it, and is raised once it has ended."""
        result: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(lambda task: _copy_result(task, result))

        self._loop.call_soon_threadsafe(start)
        try:
            return result.result()
        except BaseException:  # Ctrl-C, or the work's own error: passed on, once the work has ended
            if not result.done():
                self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
                wait([result], timeout=_CANCEL_S)
            raise

    def close(self, owner_pid: int) -> None:
        """Abort what runs, end the engines and the thread. Nothing in a fork of the process that made us."""
        if os.getpid() != owner_pid:
            return
        if threading.current_thread() is self._thread:  # garbage is collected in any thread
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
    """EngineConfig from the arguments of LLM, or of what `of` names. Raises TypeError, ValueError."""
    names, options = EngineConfig.__struct_fields__, engine_options(options)
    for name in options:
        if name not in names:
            public = [n for n in names if n not in _NOT_FOR_LLM]
            close = difflib.get_close_matches(name, public, n=3, cutoff=0.7)
            hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(public)}"
            raise TypeError(f"{of} has no option {name!r}; {hint}")
    options = with_processor_names(options)
    values = {"disable_log_stats": True, **options, "model": None if model is None else os.fspath(model)}
    if isinstance(values.get("served_model_name"), str):
        values["served_model_name"] = [values["served_model_name"]]
    try:
        return msgspec.convert(values, EngineConfig)
    except msgspec.ValidationError as error:
        raise ValueError(_in_words_of_python(str(error))) from None


def _in_words_of_python(text: str) -> str:
    """An error of msgspec or about a flag, as one about an argument of LLM."""
    what, _, path = text.partition(" - at `$.")
    if path:
        what = f"{path.rstrip('`')}: {what[:1].lower()}{what[1:]}".replace("| null", "or None").replace("`", "")
    return re.sub(r"--([a-z][a-z-]+)", lambda flag: flag[1].replace("-", "_"), what)


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or a list of them, as a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not hasattr(prompts, "__len__") or not hasattr(prompts, "__getitem__"):
        raise TypeError(f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}")
    if len(prompts) and isinstance(prompts[0], Integral):
        return [prompts]  # type: ignore[list-item]  # the token ids of one prompt
    return list(prompts)  # type: ignore[arg-type]
