"""vLLM's modules and names that Quire has no file for, so that scripts that import them start, as many do without using them.

Some lead to something of ours (`_OURS`). The others are classes that raise NotImplementedError, with the reason, when they are
called or used. `quire/__init__.py` adds the finder behind all others, so a file of ours is always found first.
"""

import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

from quire.frontend.client import engine_metrics, script_tools
from quire.frontend.client.async_llm import AsyncLLM
from quire.frontend.client.beam_search import BeamSearchOutput, BeamSearchSequence
from quire.frontend.client.engine_args import AsyncEngineArgs
from quire.frontend.client.prompt import PromptType, TextPrompt, TokensPrompt
from quire.frontend.client.stream import EngineDown

_PARTS = "the engine is a process of its own, and its parts are not vLLM's"
_IMAGES = "images are given as PIL images, arrays, bytes or paths; other media are not taken"
_LORA = "adapters are read by the engine: see quire.lora.request.LoRARequest"
_SERVER = "a server is started by `quire serve`, and its routes are not made in scripts"
_CONFIG = "options are given to LLM, EngineArgs or `quire serve` by their names"
_HELPER = "it is a helper of vLLM's own code"
_PARALLEL = "workers are processes of the engine: LLM(tensor_parallel_size=...)"

_MODULES = {  # below `quire`, with what is below them
    "assets": _IMAGES,
    "attention": _PARTS,
    "beam_search": _HELPER,
    "benchmarks": "`quire bench` measures",
    "collect_env": "`quire collect-env` prints it",
    "compilation": "nothing is compiled by torch",
    "connections": _HELPER,
    "core": _PARTS,
    "device_allocator": _PARTS,
    "distributed": _PARALLEL,
    "engine": _PARTS,
    "entrypoints": _SERVER,
    "envs": "VLLM_* variables have no effect here",
    "executor": _PARTS,
    "forward_context": _PARTS,
    "inputs": _HELPER,
    "logits_process": "LLM(logits_processors=[...]) takes classes with vLLM's methods; docs/logits-processors.md",
    "lora": _LORA,
    "model_executor": _PARTS,
    "multimodal": _IMAGES,
    "platforms": _HELPER,
    "plugins": "no code of others is loaded by a name",
    "pooling": "`LLM.embed`, `LLM.classify` and `LLM.score` pool; `quire serve --runner pooling` has the routes",
    "profiler": "`LLM.start_profile` records what workers do",
    "prompt_adapter": _LORA,
    "reasoning": "parsers are chosen by `quire serve --reasoning-parser`",
    "renderers": _HELPER,
    "scalar_type": _HELPER,
    "spec_decode": "LLM(speculative_config={...}) says what drafts tokens; LLM.get_metrics() has the counts",
    "tasks": _HELPER,
    "third_party": _HELPER,
    "tool_parsers": "parsers are chosen by `quire serve --tool-call-parser`",
    "transformers_utils": _HELPER,
    "triton_utils": _HELPER,
    "utils": _HELPER,
    "v1": _PARTS,
    "worker": _PARTS,
}

_PORTS = {"get_open_port": script_tools.get_open_port, "get_ip": script_tools.get_ip}
_TORCH = {"cuda_device_count_stateless": script_tools.cuda_device_count, "set_random_seed": script_tools.set_random_seed}
_SEED = {"set_random_seed": script_tools.set_random_seed}
_OURS: dict[str, dict[str, Any]] = {
    "quire.beam_search": {"BeamSearchOutput": BeamSearchOutput, "BeamSearchSequence": BeamSearchSequence},
    "quire.collect_env": {"main": script_tools.collect_environment},
    "quire.engine.async_llm_engine": {"AsyncEngineArgs": AsyncEngineArgs, "AsyncEngineDeadError": EngineDown},
    "quire.engine.protocol": {"EngineClient": AsyncLLM},
    "quire.entrypoints.chat_utils": {
        "load_chat_template": script_tools.load_chat_template,
        "ChatCompletionContentPartParam": dict,
        "ChatCompletionMessageParam": dict,
        "ConversationMessage": dict,
    },
    "quire.inputs.data": {"PromptType": PromptType, "TextPrompt": TextPrompt, "TokensPrompt": TokensPrompt},
    "quire.model_executor": _SEED,
    "quire.model_executor.utils": _SEED,
    "quire.model_executor.parallel_utils.parallel_state": {"destroy_model_parallel": script_tools.clean_up},
    "quire.platforms": {"Platform": script_tools.Platform, "current_platform": script_tools.platform},
    "quire.plugins": {"load_general_plugins": script_tools.clean_up},
    "quire.tokenizers": {"AnyTokenizer": Any, "TokenizerLike": Any},
    "quire.transformers_utils.tokenizer": {
        "AnyTokenizer": Any,
        "cached_get_tokenizer": script_tools.get_tokenizer,
        "get_cached_tokenizer": script_tools.same,
    },
    "quire.utils": {"is_list_of": script_tools.is_list_of, **_PORTS, **_TORCH},
    "quire.utils.collection_utils": {"is_list_of": script_tools.is_list_of},
    "quire.utils.network_utils": _PORTS,
    "quire.utils.torch_utils": _TORCH,
    "quire.v1.engine.exceptions": {"EngineDeadError": EngineDown, "EngineGenerateError": EngineDown},
    "quire.v1.metrics.reader": {name: getattr(engine_metrics, name) for name in ("Counter", "Gauge", "Metric", "Vector")},
}


def _names(names: str, reason: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


_ABSENT = {  # names of vLLM's that our own files do not have; in the modules without a file every name is taken
    "quire": {"ModelRegistry": "the families of docs/models.md are served", "initialize_ray_cluster": _PARALLEL},
    "quire.config": _names(
        "AttentionConfig EPLBConfig KVEventsConfig KVTransferConfig LoRAConfig LogprobsMode "
        "ModelDType MultiModalConfig ObservabilityConfig PassConfig PoolerConfig ProfilerConfig "
        "PromptAdapterConfig SpeculativeConfig StructuredOutputsConfig TaskOption TokenizerPoolConfig "
        "get_current_vllm_config get_layers_from_vllm_config set_current_vllm_config",
        _CONFIG,
    ),
    "quire.distributed": _names(
        "ensure_model_parallel_initialized get_pp_group get_tensor_model_parallel_rank get_tp_group "
        "get_tensor_model_parallel_world_size get_world_group init_distributed_environment "
        "initialize_model_parallel stateless_destroy_torch_distributed_process_group "
        "stateless_init_torch_distributed_process_group tensor_model_parallel_all_gather "
        "tensor_model_parallel_all_reduce tensor_model_parallel_gather",
        _PARALLEL,
    ),
    "quire.engine.arg_utils": _names(
        "nullable_str optional_type nullable_kvs HfOverrides get_kwargs _engine_args_parser",
        _HELPER,
    ),
    "quire.engine.async_llm_engine": _names(
        "AsyncStream RequestTracker build_guided_decoding_logits_processor_async",
        _PARTS,
    ),
    "quire.entrypoints.openai.api_server": _names(
        "build_app build_async_engine_client build_async_engine_client_from_engine_args init_app_state router "
        "run_server setup_server",
        _SERVER,
    ),
    "quire.inputs": _names(
        "DataPrompt EmbedsPrompt EncoderDecoderInputs ExplicitEncoderDecoderPrompt ProcessorInputs PromptInputs "
        "SingletonInputs SingletonPrompt TextTokensPrompt TokenInputs build_explicit_enc_dec_prompt token_inputs "
        "to_enc_dec_tuple_list zip_enc_dec_prompts",
        "prompts are texts, token ids, TextPrompt or TokensPrompt",
    ),
    "quire.lora.request": _names(
        "LoRALoadRequest",
        _LORA,
    ),
    "quire.outputs": _names(
        "RewardOutput RewardRequestOutput STREAM_FINISHED",
        "`LLM.encode(prompts, pooling_task='token_classify')` gives a PoolingRequestOutput",
    ),
    "quire.sequence": _names(
        "IntermediateTensors Sequence SequenceData SequenceGroup SequenceGroupMetadata SequenceOutput SequenceStatus",
        _PARTS,
    ),
    "quire.transformers_utils.tokenizer": _names(
        "MistralTokenizer decode_tokens encode_tokens",
        _HELPER,
    ),
    "quire.transformers_utils.config": _names(
        "get_hf_image_processor_config get_hf_text_config get_sentence_transformer_tokenizer_config try_get_generation_config",
        _HELPER,
    ),
    "quire.tokenizers": _names(
        "MistralTokenizer TokenizerRegistry cached_tokenizer_from_config",
        _HELPER,
    ),
    "quire.utils": _names(
        "AsyncMicrobatchTokenizer DeviceMemoryProfiler GiB_bytes LRUCache MemorySnapshot PlaceholderModule "
        "STR_DTYPE_TO_TORCH_DTYPE StoreBoolean async_tensor_h2d cdiv deprecate_kwargs direct_register_custom_op "
        "get_distributed_init_method import_from_path is_cpu is_hip is_pin_memory_available "
        "iterate_with_cancellation make_async merge_async_iterators resolve_obj_by_qualname set_ulimit "
        "supports_kw kill_process_tree get_exception_traceback get_kv_cache_torch_dtype set_default_torch_dtype",
        _HELPER,
    ),
}


class _Says(type):
    """Its classes raise NotImplementedError when they are called, or a name of theirs is used; they can be subclassed."""

    reason: str

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):  # what copy, pickle, typing and inspect ask for
            raise AttributeError(name)
        raise NotImplementedError(cls.reason)

    def __call__(cls, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError(cls.reason)


def _absent(module: str, name: str, reason: str) -> type:
    return _Says(name, (), {"__module__": module, "reason": f"{module}.{name} is not here: {reason}"})


def names_of(module: str) -> Callable[[str], Any]:
    """A module's `__getattr__` for vLLM's names in it that no file of ours defines."""

    def found(name: str) -> Any:
        if name in (ours := _OURS.get(module, {})):
            return ours[name]
        if (reason := _ABSENT.get(module, {}).get(name)) is not None:
            return _absent(module, name, reason)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return found


class _Module(ModuleType):
    """A module of vLLM's without a file of ours."""

    def __getattr__(self, name: str) -> Any:
        module = self.__name__
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if module == "quire.envs":
            return os.environ.get(name)  # None: not set
        if name in (ours := _OURS.get(module, {})):
            return ours[name]
        return _absent(module, name, _ABSENT["quire"].get(name, _MODULES[module.split(".")[1]]))


class VllmModules:
    """Finds vLLM's modules below `quire`, also those below them."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        parts = name.split(".")
        if len(parts) < 2 or parts[0] != "quire" or parts[1] not in _MODULES:
            return None
        return type(__spec__)(name, self, is_package=True)  # type: ignore[arg-type]  # a ModuleSpec

    def create_module(self, spec: Any) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass
