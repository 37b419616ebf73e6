"""LLM: offline generation from a Python script or notebook, with vLLM's shapes and names.

    from quire import LLM, SamplingParams
    with LLM("path/to/model", max_model_len=4096) as llm:
        for output in llm.generate(["Hello", "Once upon a time"], SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

The engine is the object's own (own_engine.py) and ends with it: `shutdown`, the end of a `with`, garbage collection, or the
interpreter's exit.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence, ValuesView
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, Self

from quire.frontend.client import pool_calls
from quire.frontend.client.batch import run_batch
from quire.frontend.client.beam_search import BeamSearchOutput, BeamSearchParams, beam_search_output, search_all
from quire.frontend.client.client import Client
from quire.frontend.client.engine_args import check_engine_args
from quire.frontend.client.engine_metrics import Metric, engine_metrics
from quire.frontend.client.enqueued import Enqueued
from quire.frontend.client.llm_engine import LLMEngine
from quire.frontend.client.lora_request import LoRARequest, LoRARequests, one_each, terms_of
from quire.frontend.client.media_data import chat_with_media, media_options, opened
from quire.frontend.client.model_config import ModelConfig, VllmConfig, vllm_config
from quire.frontend.client.not_here import LLM_NAMES, check_options, check_reset, without
from quire.frontend.client.outputs import RequestOutput
from quire.frontend.client.own_engine import OwnEngine, engine_config
from quire.frontend.client.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RerankResult,
    ScoringRequestOutput,
)
from quire.frontend.client.prompt import Prompt
from quire.frontend.media.parts import has_media
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.messages.utilities import ProfileDone, ResetDone, ResetPrefixCache, StartProfile, StopProfile
from quire.ipc.pooling import PoolingParams, PoolingTask
from quire.ipc.process.children import CORE_MODULE
from quire.ipc.sampling import SamplingParams

Conversation = list[dict[str, Any]]
_OLDER_NAMES = ("prompt_token_ids", "use_tqdm", "lora_request")


class LLM:
    """An engine of its own, or several (data_parallel_size), with a blocking interface. Methods may be called from several
    threads at once.

    model: folder or hub id; None: the bundled model. options: fields of EngineConfig. older: positional arguments of older
    versions of vLLM's: the tokenizer. Raises ValueError for an unknown option or a bad value, EngineStartError with the
    engine's own text.
    """

    engine_module = CORE_MODULE  # the module that the engine's process runs
    DEPRECATE_LEGACY: ClassVar[bool] = True  # vLLM's switch, without effect
    engine_class = LLMEngine

    def __init__(self, model: str | os.PathLike[str] | None = None, *older: Any, **options: Any) -> None:
        if len(older) > 1:
            raise ValueError("LLM takes the model; give all other options by name: LLM(model, dtype=...)")
        options |= dict(zip(("tokenizer",), older, strict=False))
        self._own = OwnEngine(engine_config(model, options), self.engine_module)
        self._client.media_options = media_options(options)

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> Self:
        """engine_args: an EngineArgs (engine_args.py)."""
        check_engine_args(cls.__name__, engine_args)
        return cls(engine_args.model, **engine_args.options)

    @classmethod
    @contextlib.contextmanager
    def deprecate_legacy_api(cls) -> Iterator[None]:
        """vLLM's context that warns of older arguments: no effect."""
        yield

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *older: Any,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: Sequence[int] | int | None = None,
        lora_request: LoRARequests = None,
        **others: None,
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts.

        prompts: one prompt or a list of them; a prompt is a text, a list of token ids, a TextPrompt or a TokensPrompt, which
        are dicts. sampling_params: one for all or one each; None: the model's defaults. priority: the same, lower runs first;
        needs scheduling_policy="priority". lora_request: an adapter for all, or one or None each. Raises ValueError for an
        invalid prompt or parameter, before any prompt runs, and EngineDown if the engine is lost. Ctrl-C aborts the requests.
        others: vLLM's options that must be None (not_here.py). older: positional arguments of older versions of vLLM's.
        """
        names = ("use_tqdm", "lora_request") if isinstance(next(iter(older), None), bool) else _OLDER_NAMES
        if len(older) > len(names):
            raise ValueError("LLM.generate() takes prompts and sampling_params; give all other arguments by name")
        given = dict(zip(names, older, strict=False))
        use_tqdm = given.pop("use_tqdm", use_tqdm)
        lora_request = given.pop("lora_request", lora_request)
        check_options("LLM.generate", {**given, **others})
        if prompts is None:
            raise ValueError("LLM.generate() needs prompts: a text, a list of token ids, or a list of these")
        batch = _prompt_list(prompts)
        params = self._params(sampling_params, len(batch))
        if isinstance(priority, int):
            priority = [priority] * len(batch)
        if priority is not None and len(priority) != len(batch):
            raise ValueError(f"there are {len(batch)} prompts and {len(priority)} priorities")
        loras = one_each(lora_request, len(batch))
        return self._own.run(run_batch(self._client, batch, params, priority, bool(use_tqdm), loras))

    def chat(
        self,
        messages: Conversation | Sequence[Conversation] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequests = None,
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
        check_options("LLM.chat", others)
        prompts = self.preprocess_chat(
            messages,  # type: ignore[arg-type]  # None is refused there
            tools=tools,
            documents=documents,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
            chat_template_content_format=chat_template_content_format,
        )
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def preprocess_chat(
        self,
        messages: Conversation | Sequence[Conversation],
        *,
        chat_template_content_format: Literal["auto", "string", "openai"] = "auto",
        **options: Any,
    ) -> list[Prompt]:
        """The prompts of one conversation or a list of them, as `chat` makes them. options: those of `chat` about templates."""
        if chat_template_content_format not in ("auto", "string", "openai"):
            raise ValueError(f"chat_template_content_format is auto, string or openai, not {chat_template_content_format!r}")
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
            kind = type(messages).__name__
            raise ValueError(
                "messages must be a list of messages, such as {'role': 'user', 'content': 'Hi'}, or a list of such lists, "
                f"got {kind}"
            )
        conversations: Sequence[Any] = [messages] if messages and isinstance(messages[0], Mapping) else messages
        tokenizer, options["chat_template_content_format"] = self._client.tokenizer, chat_template_content_format
        conversations = [list(some) if isinstance(some, tuple) else some for some in conversations]
        if any(map(has_media, conversations)):
            self._own.run(opened(self._client))
            return [chat_with_media(self._client, some, options) for some in conversations]
        if self._client.welcome.limits.takes_marks:
            return [_marked_prompt(tokenizer, conversation, options) for conversation in conversations]
        texts = [tokenizer.render_chat(conversation, **options) for conversation in conversations]  # type: ignore[arg-type]
        rows = tokenizer.encode_batch(texts, add_special_tokens=False)
        return [{"prompt": text, "prompt_token_ids": ids} for text, ids in zip(texts, rows, strict=True)]

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
        use_tqdm: bool = True,
        **others: None,
    ) -> list[str]:
        """Begin requests without waiting for them; returns their ids. Arguments and errors as for `generate`."""
        check_options("LLM.enqueue", others)
        batch = _prompt_list(prompts)
        loras = one_each(lora_request, len(batch))
        return self._enqueued.add(batch, self._params(sampling_params, len(batch)), priority or [0] * len(batch), loras)

    def wait_for_completion(self, output_type: object = None, *, use_tqdm: bool = True) -> list[RequestOutput]:
        """Wait for all enqueued requests; returns their outputs, in order. output_type and use_tqdm have no effect."""
        return self._enqueued.collect()

    @functools.cached_property
    def _enqueued(self) -> Enqueued:
        return Enqueued(self.llm_engine)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequests = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
        **others: None,
    ) -> list[BeamSearchOutput]:
        """The most likely continuations of each prompt, best first. concurrency_limit: prompts at once; None: 16.

        Prompts, others and errors as for `generate`.
        """
        check_options("LLM.beam_search", others)
        batch = _prompt_list(prompts)
        loras = one_each(lora_request, len(batch))
        work = search_all(self._client, batch, params, concurrency_limit, use_tqdm, loras)
        return [beam_search_output(each, self._client._tokenizer) for each in self._own.run(work)]

    # ------------------------------------------------------------------------------------------------- vectors and scores
    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_task: PoolingTask | None = None,
        lora_request: LoRARequest | None = None,
        **others: None,
    ) -> list[PoolingRequestOutput]:
        """Each prompt's result of a task, by default the model's first: see PoolingParams. The other calls below name theirs.

        Prompts as for `generate`, with one adapter; others: vLLM's options that must be None. use_tqdm has no effect. Raises
        ValueError for a bad prompt or parameter, or a task that the model lacks."""
        check_options("LLM.encode", others)
        client, terms = self._client, self._own.run(terms_of(self._client, lora_request))
        return self._own.run(pool_calls.encode(client, _prompt_list(prompts), pooling_params, pooling_task, terms=terms))

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
        **others: None,
    ) -> list[EmbeddingRequestOutput]:
        """A vector of each prompt."""
        check_options("LLM.embed", others)
        terms = self._own.run(terms_of(self._client, lora_request))
        return self._own.run(pool_calls.embed(self._client, _prompt_list(prompts), pooling_params, terms=terms))

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
        **others: None,
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of the model's labels for each prompt."""
        check_options("LLM.classify", others)
        terms = self._own.run(terms_of(self._client, lora_request))
        return self._own.run(pool_calls.classify(self._client, _prompt_list(prompts), pooling_params, terms=terms))

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | None = None,
        **others: None,
    ) -> list[ScoringRequestOutput]:
        """A score of each pair of texts, one with n or n with n: a classifier's, or the cosine of their vectors."""
        check_options("LLM.score", others)
        return self._own.run(pool_calls.score(self._client, data_1, data_2, pooling_params))

    def rerank(
        self, query: str, documents: Sequence[str], top_n: int | None = None, *, instruction: str | None = None
    ) -> list[RerankResult]:
        """The documents by their scores for the query, the best first. instruction: for a reranker that takes one."""
        return self._own.run(pool_calls.rerank(self._client, query, documents, top_n, None, instruction))

    def get_tokenizer(self, lora_request: object = None) -> Any:
        """transformers' tokenizer of the model's files. The first call imports transformers."""
        return self._own.tokenizer

    @property
    def model_config(self) -> ModelConfig:
        """The known configuration of the model: max_model_len, vocab_size, dtype, ..."""
        return self.vllm_config.model_config

    @functools.cached_property
    def llm_engine(self) -> LLMEngine:
        """This engine as an LLMEngine, for vLLM's scripts that read its model_config, or add requests and step."""
        return LLMEngine(self._own)

    @property
    def vllm_config(self) -> VllmConfig:
        """The engine's configuration, as far as it is known, under vLLM's names."""
        return vllm_config(self._own.options, self._client)

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams with the model's own defaults, from generation_config.json."""
        return self._client.default_sampling_params()

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """The tasks that this model can be asked for, by vLLM's names."""
        return tuple(self._client.welcome.limits.tasks)

    def get_world_size(self, include_dp: bool = True) -> int:
        """The number of workers: of all engines, or without include_dp of one."""
        options = self._own.options
        return options.world_size * (options.data_parallel_size if include_dp else 1)

    def get_metrics(self) -> list[Metric]:
        """Figures of the engine, at most half a second old, by the names of /metrics (engine_metrics.py)."""
        return engine_metrics(self._client)

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Let workers record a profile, for at most a thousand steps. Needs `profile_dir`; profile_prefix has no effect."""
        self._own.run(self._client.utility(StartProfile(), ProfileDone))

    def stop_profile(self) -> list[str]:
        """Write the traces, one per rank, into `profile_dir`; returns the files' names."""
        return self._own.run(self._client.utility(StopProfile(), ProfileDone)).traces

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes. False if requests run: their blocks will be cached again."""
        check_reset(reset_running_requests)
        return self._own.run(self._client.utility(ResetPrefixCache(), ResetDone)).complete

    def reset_mm_cache(self) -> None:
        """vLLM's cache of images: there is none here, and nothing to forget."""

    def shutdown(self) -> None:
        """End the engine and free its memory. May be called again; afterwards `generate` raises EngineDown."""
        self._own.shutdown()

    if not TYPE_CHECKING:  # type checkers must not know other names

        def __getattr__(self, name: str) -> Any:
            return without(self, name, LLM_NAMES)

    def __delattr__(self, name: str) -> None:
        """`del llm.llm_engine` and such are vLLM's ways of freeing memory: `shutdown` does it, or the end of the LLM itself."""
        if name in self.__dict__:
            object.__delattr__(self, name)
        elif not hasattr(type(self), name):
            without(self, name, LLM_NAMES)

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError("LLM objects are not called: write llm.generate(prompts, SamplingParams(...))")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def _client(self) -> Client:
        return self._own.client

    def _params(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        if isinstance(params, str | Mapping) or not isinstance(params, Sequence):
            hint = "; SamplingParams(**fields) makes one of a dict" if isinstance(params, Mapping) else ""
            raise ValueError(f"sampling_params must be SamplingParams or a list of them, got {type(params).__name__}{hint}")
        if len(params) != count:
            raise ValueError(f"there are {count} prompts and {len(params)} sampling_params")
        return list(params)


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or a list of them, as a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, Iterator | ValuesView | KeysView):
        return list(prompts)  # type: ignore[arg-type]
    if hasattr(prompts, "tolist"):  # an array or a tensor
        prompts = prompts.tolist()
    if not hasattr(prompts, "__len__") or not hasattr(prompts, "__getitem__"):
        raise ValueError(f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}")
    if len(prompts) and isinstance(prompts[0], Integral):  # type: ignore[index]
        return [prompts]  # type: ignore[list-item]  # the token ids of one prompt
    return list(prompts)  # type: ignore[arg-type]


def _marked_prompt(tokenizer: Tokenizer, conversation: Any, options: dict[str, Any]) -> Prompt:
    text, ends = tokenizer.render_marked_chat(conversation, **options)
    ids, marks = tokenizer.encode_marked(text, False, ends)
    return {"prompt": text, "prompt_token_ids": ids, "marks": marks}
