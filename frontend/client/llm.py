"""LLM: offline generation from a Python script or notebook, with vLLM's shapes and names.

    from quire import LLM, SamplingParams
    with LLM("path/to/model", max_model_len=4096) as llm:
        for output in llm.generate(["Hello", "Once upon a time"], SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

The engine is the object's own (own_engine.py) and ends with it: `shutdown`, the end of a `with`, garbage collection, or the
interpreter's exit.
"""

import functools
import os
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, Self

from quire.frontend.client.batch import run_batch
from quire.frontend.client.beam_search import BeamSearchOutput, BeamSearchParams, beam_search_output, search_all
from quire.frontend.client.client import Client
from quire.frontend.client.llm_engine import LLMEngine
from quire.frontend.client.model_config import ModelConfig, vllm_config
from quire.frontend.client.not_here import LLM_METHODS, check_options, check_reset, without
from quire.frontend.client.outputs import RequestOutput
from quire.frontend.client.own_engine import OwnEngine, engine_config
from quire.frontend.client.prompt import Prompt
from quire.ipc.messages.utilities import ProfileDone, ResetDone, ResetPrefixCache, StartProfile, StopProfile
from quire.ipc.process.children import CORE_MODULE
from quire.ipc.sampling import SamplingParams

Conversation = list[dict[str, Any]]


class LLM:
    """An engine of its own, or several (data_parallel_size), with a blocking interface. Methods may be called from several
    threads at once.

    model: folder or hub id; None: the bundled model. options: fields of EngineConfig. Raises TypeError for an unknown option,
    ValueError for a bad value, EngineStartError with the engine's own text.
    """

    engine_module = CORE_MODULE  # the module that the engine's process runs

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Any) -> None:
        self._own = OwnEngine(engine_config(model, options), self.engine_module)

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> Self:
        """engine_args: an EngineArgs (engine_args.py)."""
        return cls(engine_args.model, **engine_args.options)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        **others: None,
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts.

        prompts: one prompt or a list of them; a prompt is a text, a list of token ids, a TextPrompt or a TokensPrompt, which
        are dicts. sampling_params: one for all or one each; None: the model's defaults. priority: one each, lower runs first;
        needs scheduling_policy="priority". Raises TypeError or ValueError for an invalid prompt or parameter, before any prompt
        runs, and EngineDown if the engine is lost. Ctrl-C aborts the requests. others: vLLM's options that must be None
        (not_here.py).
        """
        check_options("LLM.generate", others)
        if prompts is None:
            raise TypeError("LLM.generate() needs prompts: a text, a list of token ids, or a list of these")
        batch = _prompt_list(prompts)
        params = self._params(sampling_params, len(batch))
        if priority is not None and len(priority) != len(batch):
            raise ValueError(f"there are {len(batch)} prompts and {len(priority)} priorities")
        return self._own.run(run_batch(self._client, batch, params, priority, use_tqdm))

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
        tokenizer = self._client.tokenizer
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
        lora_request: None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
        **others: None,
    ) -> list[BeamSearchOutput]:
        """The most likely continuations of each prompt, best first. concurrency_limit: prompts at once; None: 16.

        Prompts, others and errors as for `generate`.
        """
        check_options("LLM.beam_search", {"lora_request": lora_request, **others})
        work = search_all(self._client, _prompt_list(prompts), params, concurrency_limit, use_tqdm)
        return [beam_search_output(each, self._client._tokenizer) for each in self._own.run(work)]

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer of the model's files. The first call imports transformers."""
        return self._own.tokenizer

    @property
    def model_config(self) -> ModelConfig:
        """The known configuration of the model: max_model_len, vocab_size, dtype, ..."""
        return vllm_config(self._own.options, self._client).model_config

    @functools.cached_property
    def llm_engine(self) -> LLMEngine:
        """This engine as an LLMEngine, for vLLM's scripts that read its model_config, or add requests and step."""
        return LLMEngine(self._own)

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams with the model's own defaults, from generation_config.json."""
        return self._client.default_sampling_params()

    def start_profile(self) -> None:
        """Let every worker record a profile, for at most a thousand steps. Needs `profile_dir`."""
        self._own.run(self._client.utility(StartProfile(), ProfileDone))

    def stop_profile(self) -> list[str]:
        """Write the traces, one per rank, into `profile_dir`; returns the files' names."""
        return self._own.run(self._client.utility(StopProfile(), ProfileDone)).traces

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes. False if requests run: their blocks will be cached again."""
        check_reset(reset_running_requests)
        return self._own.run(self._client.utility(ResetPrefixCache(), ResetDone)).complete

    def shutdown(self) -> None:
        """End the engine and free its memory. May be called again; afterwards `generate` raises EngineDown."""
        self._own.shutdown()

    if not TYPE_CHECKING:  # type checkers must not know other names

        def __getattr__(self, name: str) -> Any:
            raise without(self, name, LLM_METHODS)

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
            raise TypeError(f"sampling_params must be SamplingParams or a list of them, got {type(params).__name__}")
        if len(params) != count:
            raise ValueError(f"there are {count} prompts and {len(params)} sampling_params")
        return list(params)


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or a list of them, as a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not hasattr(prompts, "__len__") or not hasattr(prompts, "__getitem__"):
        raise TypeError(f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}")
    if len(prompts) and isinstance(prompts[0], Integral):
        return [prompts]  # type: ignore[list-item]  # the token ids of one prompt
    return list(prompts)  # type: ignore[arg-type]
