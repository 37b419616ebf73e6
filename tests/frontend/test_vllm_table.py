"""Many idioms of vLLM's scripts, with the first word of their imports changed, on one LLM: each works, or says why not.

What says why not raises no plain TypeError or AttributeError, which would read as a fault of Quire's.
"""

from collections.abc import Iterator

import pytest

from quire import LLM, EngineArgs, SamplingParams

IMPORTS = """
from quire import LLM, LLMEngine, AsyncLLMEngine, EngineArgs, AsyncEngineArgs, SamplingParams, RequestOutput, CompletionOutput
from quire import EmbeddingRequestOutput, ModelRegistry, PoolingParams, ScoringRequestOutput, TextPrompt, TokensPrompt
from quire import __version__, __version_tuple__, envs, initialize_ray_cluster
from quire.assets.image import ImageAsset
from quire.beam_search import BeamSearchOutput
from quire.benchmarks.datasets import RandomDataset
from quire.collect_env import get_pretty_env_info, main
from quire.config import CacheConfig, CompilationConfig, CompilationLevel, KVTransferConfig, LoadConfig, VllmConfig
from quire.config import ModelConfig, ParallelConfig, PoolerConfig, SchedulerConfig, SpeculativeConfig, StructuredOutputsConfig
from quire.distributed import destroy_distributed_environment, get_tensor_model_parallel_rank, init_distributed_environment
from quire.distributed.device_communicators.pynccl import PyNcclCommunicator
from quire.distributed.parallel_state import destroy_model_parallel
from quire.distributed.utils import StatelessProcessGroup
from quire.engine.arg_utils import AsyncEngineArgs, EngineArgs, nullable_str
from quire.engine.async_llm_engine import AsyncEngineArgs, AsyncEngineDeadError, AsyncLLMEngine, AsyncStream
from quire.engine.metrics import StatLoggerBase
from quire.engine.protocol import EngineClient
from quire.entrypoints.chat_utils import ChatCompletionMessageParam, apply_hf_chat_template, load_chat_template
from quire.entrypoints.openai.api_server import build_app, run_server
from quire.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
from quire.entrypoints.openai.protocol import ChatCompletionRequest, DeltaMessage
from quire.entrypoints.openai.tool_parsers import ToolParser, ToolParserManager
from quire.inputs import PromptType, SingletonPrompt, TextPrompt, TokensPrompt, zip_enc_dec_prompts
from quire.inputs.data import TextPrompt, TokensPrompt
from quire.logits_process import LogitsProcessor
from quire.logprobs import Logprob, PromptLogprobs, SampleLogprobs
from quire.lora.request import LoRARequest
from quire.lora.utils import parse_fine_tuned_lora_name
from quire.model_executor.models.qwen2 import Qwen2ForCausalLM
from quire.model_executor.models.registry import ModelRegistry
from quire.model_executor.parallel_utils.parallel_state import destroy_model_parallel
from quire.multimodal import MULTIMODAL_REGISTRY
from quire.multimodal.utils import fetch_image
from quire.outputs import STREAM_FINISHED, ClassificationOutput, EmbeddingOutput, RequestOutput
from quire.platforms import current_platform
from quire.plugins import load_general_plugins
from quire.pooling_params import PoolingParams
from quire.prompt_adapter.request import PromptAdapterRequest
from quire.reasoning import ReasoningParser, ReasoningParserManager
from quire.sampling_params import BeamSearchParams, GuidedDecodingParams, RequestOutputKind, SamplingType
from quire.sequence import Logprob, PromptLogprobs, RequestMetrics, SampleLogprobs, SequenceStatus
from quire.tokenizers import TokenizerLike, get_tokenizer
from quire.transformers_utils.config import get_config, get_hf_text_config
from quire.transformers_utils.tokenizer import AnyTokenizer, MistralTokenizer, get_tokenizer
from quire.usage.usage_lib import UsageContext
from quire.utils import Counter, FlexibleArgumentParser, LRUCache, get_ip, get_open_port, random_uuid
from quire.utils.async_utils import merge_async_iterators
from quire.utils.network_utils import get_open_port
from quire.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from quire.v1.executor.abstract import Executor
from quire.v1.metrics.loggers import LoggingStatLogger, StatLoggerBase
from quire.v1.metrics.reader import Counter, Gauge, Metric
from quire.v1.sample.logits_processor import AdapterLogitsProcessor, BatchUpdate, LogitsProcessor
from quire.v1.worker.gpu_worker import Worker
from quire.worker.worker import Worker
"""
WORKS = """
llm.generate("Hi", params)[0].outputs[0].text
llm.generate(["Hi", "Ho"], [params, params])[1].finished
llm.generate(("Hi", "Ho"), params, False)
llm.generate((prompt for prompt in ["Hi"]), params)
llm.generate(TextPrompt(prompt="Hi"), sampling_params=params, use_tqdm=False, lora_request=None, priority=[0])
llm.generate([TokensPrompt(prompt_token_ids=[1, 2, 3]), [4, 5]], params)
llm.generate({"prompt": "Hi", "multi_modal_data": None}, params)
llm.generate("Hi", SamplingParams(max_tokens=2, n=2, best_of=2, seed=1, temperature=0.9))[0].outputs[1].token_ids
llm.generate("Hi", SamplingParams(max_tokens=2, guided_decoding=GuidedDecodingParams(choice=["a"], backend="x")))
llm.generate("Hi", params)[0].metrics.first_token_time
llm.generate("Hi", params)[0].metrics.time_in_queue + llm.generate("Hi", params)[0].metrics.first_scheduled_time
llm.generate("Hi", params)[0].metrics.first_token_latency >= 0
vars(llm.generate("Hi", params)[0]).keys() >= {"prompt", "outputs"}
pickle.loads(pickle.dumps(llm.generate("Hi", params)))[0].outputs[0].finish_reason
copy.deepcopy(llm.generate("Hi", SamplingParams(max_tokens=2, logprobs=1)))[0].outputs[0].logprobs[0]
dataclasses.asdict(llm.generate("Hi", params)[0].outputs[0])["text"]
llm.generate("Hi", params)[0].multi_modal_placeholders is llm.generate("Hi", params)[0].encoder_prompt
llm.chat([{"role": "user", "content": "Hi"}], params)
llm.chat([[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]] * 2, sampling_params=params)
llm.generate(llm.preprocess_chat([{"role": "user", "content": "Hi"}]), params)
llm.enqueue(["Hi", "Ho"], params) and len(llm.wait_for_completion()) == 2
llm.beam_search([{"prompt": "Hi"}], BeamSearchParams(beam_width=2, max_tokens=2))[0].sequences[0].cum_logprob
llm.get_tokenizer().encode("Hi") == llm.llm_engine.tokenizer.tokenizer.encode("Hi")
llm.get_default_sampling_params().clone()
llm.supported_tasks == ("generate",) and llm.get_world_size() == 1
llm.reset_prefix_cache() and llm.reset_mm_cache() is None
{metric.name for metric in llm.get_metrics()} >= {"vllm:num_requests_running", "vllm:generation_tokens"}
llm.llm_engine.model_config.hf_config.vocab_size == llm.llm_engine.get_model_config().get_vocab_size()
llm.llm_engine.model_config.hf_text_config.hidden_size == llm.model_config.get_hidden_size() > llm.model_config.get_head_size()
llm.llm_engine.vllm_config.cache_config.block_size * llm.llm_engine.cache_config.num_gpu_blocks
llm.llm_engine.scheduler_config.max_num_seqs == llm.llm_engine.vllm_config.scheduler_config.max_num_seqs == 8
llm.llm_engine.parallel_config.tensor_parallel_size == llm.llm_engine.vllm_config.parallel_config.world_size == 1
llm.llm_engine.check_health() is llm.llm_engine.do_log_stats() is llm.llm_engine.lora_config is None
llm.llm_engine.add_request("1", "Hi", sampling_params=params) or [o for o in iter(llm.llm_engine.step, []) if o[0].finished]
llm.llm_engine.has_unfinished_requests() or llm.llm_engine.abort_request(["2"]) is None
SamplingParams(best_of=1, use_beam_search=False, logits_processors=[], truncate_prompt_tokens=None, guided_decoding=None)
SamplingParams(temperature=0).sampling_type is SamplingType.GREEDY
SamplingParams(stop_token_ids=[1]).all_stop_token_ids == {1}
SamplingParams.from_optional(n=1, temperature=0.5, top_k=-1, max_tokens=7).guided_decoding is None
msgspec.structs.asdict(pickle.loads(pickle.dumps(params)))["max_tokens"] == copy.deepcopy(params).max_tokens
"temperature" in SamplingParams.__struct_fields__ and "temperature" in inspect.signature(SamplingParams).parameters
GuidedDecodingParams.from_optional() is None
GuidedDecodingParams.from_optional(json={"type": "object"}).json == {"type": "object"}
EngineArgs(dtype=torch.bfloat16, reasoning_parser="qwen3", swap_space=4, enable_lora=False, task="generate").dtype == "bfloat16"
dataclasses.asdict(EngineArgs(max_model_len=128))["max_model_len"] == 128
EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(["--max_model_len", "64"]).max_model_len == 64
CompilationConfig(level=CompilationLevel.PIECEWISE).level == 3
envs.VLLM_USE_V1 is None
current_platform.is_cuda() or current_platform.device_type == "cpu"
load_chat_template("{{ messages }}") == "{{ messages }}"
init_logger("a").info_once("x") is init_logger("a").warning_once("x") is None
RequestOutput("a", prompt="x", prompt_token_ids=[1], prompt_logprobs=None, outputs=[], finished=True).request_id
CompletionOutput(index=0, text="a", token_ids=[1], cumulative_logprob=None, logprobs=None).finished() or Logprob(-1.0).logprob
1024 <= get_open_port() < 65536 and get_ip()
destroy_model_parallel() is None
set_random_seed(1) is None
issubclass(type("Mine", (LogitsProcessor,), {}), LogitsProcessor)
SamplingParams(skip_clone=True, flat_logprobs=False).skip_clone is False
params.best_of is params.logits_processors is params.truncate_prompt_tokens is None
params.use_beam_search is params.early_stopping is False and params.length_penalty == 1.0
hasattr(params, "prompt_adapter") is getattr(params, "adapter", False)
LLM.deprecate_legacy_api().__enter__() is LLMEngine.enable_output_validation().__enter__() is None and LLM.DEPRECATE_LEGACY
llm.engine_class is LLMEngine and llm.vllm_config.model_config.max_model_len == 256
llm.get_tokenizer(None) is llm.llm_engine.get_tokenizer(lora_request=None) is llm.llm_engine.tokenizer.get_lora_tokenizer(None)
llm.llm_engine.log_stats is False and llm.llm_engine.get_supported_tasks() == ("generate",)
LLMEngine.validate_outputs(llm.generate("Hi", params), RequestOutput)[0].finished and LLMEngine.validate_output(llm, LLM) is llm
llm.llm_engine.speculative_config is llm.llm_engine.prompt_adapter_config is llm.llm_engine.vllm_config.quant_config is None
llm.llm_engine.device_config.device_type == "cpu" and llm.llm_engine.load_config.load_format
llm.llm_engine.scheduler_config.max_model_len == 256 and llm.llm_engine.scheduler_config.chunked_prefill_enabled
llm.llm_engine.cache_config.swap_space == llm.llm_engine.cache_config.num_cpu_blocks == llm.llm_engine.parallel_config.rank
llm.llm_engine.model_config.architectures == [llm.llm_engine.model_config.architecture] == ["LlamaForCausalLM"]
llm.model_config.get_num_kv_heads(llm.llm_engine.parallel_config) == llm.model_config.get_total_num_kv_heads()
llm.model_config.get_num_attention_heads(llm.llm_engine.parallel_config) > llm.model_config.is_multimodal_model
llm.model_config.task == llm.model_config.runner_type == "generate" and llm.model_config.tokenizer_mode == "auto"
pickle.loads(pickle.dumps(llm.model_config)) == copy.deepcopy(llm.model_config)
EngineArgs(max_model_len=64).create_engine_config(UsageContext.LLM_CLASS).model_config.max_model_len == 64
EngineArgs(dtype="half", seed=3).create_engine_config().model_config.dtype == "float16"
EngineArgs(block_size=16).create_engine_config().cache_config.block_size == 16
EngineArgs(tensor_parallel_size=2).create_engine_config().parallel_config.world_size == 2
EngineArgs().create_engine_config().model_config.get_num_layers() > 0
EngineArgs().create_engine_config().lora_config is EngineArgs().create_engine_config().speculative_config is None
EngineArgs(speculative_config={"method": "ngram", "prompt_lookup_max": 3}).speculative_config.prompt_lookup_min == 3
EngineArgs(spec_method="ngram", spec_tokens=4).create_engine_config().speculative_config.num_speculative_tokens == 4
EngineArgs(swap_space=4, trust_remote_code=True).swap_space == 4 and EngineArgs().trust_remote_code is None
vars(EngineArgs(max_num_seqs=3))["max_num_seqs"] == copy.copy(EngineArgs(max_num_seqs=3)).max_num_seqs
EngineArgs(model="m", **vars(argparse.Namespace(max_num_seqs=3, disable_log_requests=True))).model == "m"
AsyncEngineArgs(disable_log_requests=True, enable_log_requests=False).max_num_seqs is None
llm.generate("Hi", params, None, True)[0].outputs[0].token_ids
llm.generate(["Hi", "Ho"], params, priority=0)[1].finished
llm.generate(torch.tensor([1, 2, 3]), params)[0].prompt_token_ids == [1, 2, 3]
llm.generate([np.array([1, 2]), np.array([3])], params)[1].prompt_token_ids == [3]
llm.generate({"a": "Hi"}.values(), params)[0].prompt == "Hi"
llm.generate(["Hi"], params, lora_request=[None], mm_processor_kwargs={})[0].finished
llm.generate("Hi", SamplingParams(n=4, max_tokens=2, temperature=0.9, seed=1))[0].outputs[3].index == 3
llm.generate("Hi", SamplingParams(max_tokens=9, stop=["zzz"], stop_token_ids=(1,)))[0].outputs[0].stop_reason is None
llm.generate("Hi", SamplingParams(max_tokens=2, logprobs=0))[0].outputs[0].cumulative_logprob <= 0
{lp.decoded_token for lp in llm.generate("Hi", SamplingParams(max_tokens=1, logprobs=3))[0].outputs[0].logprobs[0].values()}
llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1, prompt_logprobs=1))[0].prompt_logprobs[1][6].logprob < 0
llm.generate("Hi", params, use_tqdm=lambda items, **options: items)[0].finished
llm.chat([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}], params, add_generation_prompt=False)
llm.llm_engine.add_request("9", "Hi", params, 0.0, None, None, None, 0) or llm.llm_engine.abort_request("9", internal=False)
llm.llm_engine.abort_request(5) is None
delattr(llm, "llm_engine") is delattr(llm.llm_engine, "model_executor") is None and llm.generate("Hi", params)[0].finished
delattr(llm.llm_engine.model_executor, "driver_worker") is None
current_platform.get_device_total_memory() > 0 and current_platform.device_count() >= 0
current_platform.has_device_capability(80) == (current_platform.get_device_capability() is not None)
CompilationConfig(3).level == 3
BeamSearchParams(beam_width=2, max_tokens=2, temperature=0.0, length_penalty=1.0).beam_width == 2
GuidedDecodingParams(json={}, backend="outlines", disable_fallback=True).json == {}
"""
SAYS = {  # the call, and a part of what it says
    "llm.generate(None, params, [[1, 2]])": "give token ids as a prompt",
    "llm.generate({'prompt': 'Hi', 'multi_modal_data': {'image': 1}}, params)": "an image is a PIL image",
    "llm.generate({'prompt_embeds': 1}, params)": "texts or token ids",
    "llm.generate('Hi', params, [[1]], True, None, None)": "give all other arguments by name",
    "llm.chat([{'role': 'user', 'content': [{'type': 'image_url', 'image_url': {'url': 'x'}}]}], params)": "takes text only",
    "llm.embed(['Hi'])": "does not make vectors or scores; it can generate",
    "llm.score('a', ['b'])": "cannot score pairs of texts; it can generate",
    "llm.sleep(level=1)": "engines do not sleep",
    "llm.collective_rpc('f')": "no code is called by name",
    "llm.apply_model(print)": "the model is in another process",
    "llm.start_profile('prefix')": "profile",
    "llm.set_tokenizer(None)": "LLM(tokenizer=...)",
    "llm._run_engine(use_tqdm=False)": "`generate` does this by itself",
    "llm.llm_engine.model_executor.driver_worker.model_runner.model": "a process of its own",
    "llm.llm_engine.scheduler[0]": "a process of its own",
    "llm.generate('Hi', params)[0].metrics.num_generation_tokens + 1": "count the token_ids",
    "SamplingParams(use_beam_search=True)": "LLM.beam_search",
    "SamplingParams(best_of=3)": "use n",
    "SamplingParams(logits_processors=[print])": "LLM(logits_processors=[...])",
    "EngineArgs(speculative_config={'method': 'eagle', 'model': 'x'})": "method 'eagle' is not served yet",
    "EngineArgs(spec_method='ngram', spec_tokens='x')": "num_speculative_tokens: expected int",
    "EngineArgs().create_model_config()": "LLM(...).model_config",
    "LLMEngine.from_vllm_config(None)": "create_engine_config()",
    "PoolingParams(dimensions=0)": "dimensions must be between 1",
    "ModelRegistry.register_model('A', object)": "docs/models.md",
    "ImageAsset('stop_sign').pil_image": "images are given as PIL images",
    "KVTransferConfig(kv_role='kv_both')": "by their names",
    "get_tensor_model_parallel_rank()": "tensor_parallel_size",
    "run_server(None)": "`quire serve`",
    "llm('Hi')": "llm.generate(prompts, SamplingParams(...))",
    "llm.generate('Hi', {'temperature': 0.1})": "SamplingParams(**fields) makes one of a dict",
    "llm.generate(['Hi', 'Ho'], [params, {'n': 1}])": "sampling_params must be SamplingParams(...), got dict",
    "llm.generate('Hi', params, use_tqdn=False)": "did you mean use_tqdm?",
    "llm.generate('Hi', sampling_param=params)": "did you mean sampling_params?",
    "llm.generate('Hi', max_tokens=5)": "write SamplingParams(max_tokens=...)",
    "llm.generate('Hi', params, stream=True)": "AsyncLLM.generate",
    "llm.generate(prompt='Hi')": "the first argument is prompts",
    "llm.generate('Hi', params, cache_salt='a')": "'cache_salt': salt",
    "llm.generate({'Hi'}, params)": "got set",
    "llm.generate([{'prompt': 5}], params)": "a prompt is a text",
    "llm.chat('Hi', params)": "{'role': 'user', 'content': 'Hi'}",
    "llm.chat(conversation=[])": "the first argument is messages",
    "llm.chat([{'role': 'user', 'content': 'Hi'}], params, enable_thinking=False)": "chat_template_kwargs",
    "llm.beam_search(['Hi'], params)": "BeamSearchParams(beam_width=..., max_tokens=...)",
    "llm.close()": "LLM.shutdown()",
    "llm.stream('Hi')": "AsyncLLM.generate streams",
    "llm.add_request('1', 'Hi', params)": "LLM.llm_engine.add_request",
    "llm.tokenizer.encode('Hi')": "LLM.get_tokenizer()",
    "llm.generate('Hi', params)[0].text": "output.outputs[0]",
    "llm.generate('Hi', params)[0].outputs[0].reasoning_content": "`quire serve`",
    "llm.llm_engine.model_config.max_modal_len": "did you mean max_model_len?",
    "llm.llm_engine.stat_loggers[0]": "a process of its own",
    "llm.llm_engine.add_request(1, 'Hi', params)": "request_id must be a string",
    "llm.llm_engine.add_request('1', prompt='Hi', sampling_parms=params)": "did you mean sampling_params?",
    "LLM(max_model_length=64)": "did you mean max_model_len?",
    "LLM(gpu_memory_utilisation=0.5)": "did you mean gpu_memory_utilization?",
    "LLM(temperature=1)": "SamplingParams(temperature=...)",
    "LLM(log_stats=True)": "disable_log_stats",
    "LLM(rope_scaling={'type': 'dynamic', 'factor': 2.0})": "hf_overrides={'rope_scaling': ...}",
    "LLM(model_path='x')": "the model comes first",
    "LLM('a', 'b', 'c')": "give all other options by name",
    "LLM(5)": "a folder or hub id",
    "LLM(EngineArgs())": "LLM.from_engine_args",
    "LLMEngine.from_engine_args({'model': 'x'})": "EngineArgs(model, ...)",
    "LLMEngine(model='x')": "LLMEngine.from_engine_args(EngineArgs(model, ...))",
    "AsyncLLMEngine(model='x')": "AsyncLLM.from_engine_args(EngineArgs(model, ...))",
    "LLMEngine.validate_output('a', RequestOutput)": "expected an output of type RequestOutput",
    "setattr(EngineArgs(), 'max_num_seq', 5)": "did you mean max_num_seqs?",
    "EngineArgs().create_engine_config().cache_config.num_gpu_blocks + 1": "a started engine knows it",
    "ModelConfig(model='x', tokenizer='x')": "by their names",
    "VllmConfig()": "by their names",
    "SamplingParams(0.5)": "SamplingParams(n=..., temperature=...)",
    "SamplingParams(temprature=0)": "did you mean temperature?",
    "SamplingParams(max_new_tokens=5)": "use max_tokens",
    "SamplingParams(do_sample=True)": "temperature=0.0 is greedy",
    "SamplingParams(guided_json={})": "StructuredOutputsParams(json=...)",
    "SamplingParams(stop_token_ids=1)": "stop_token_ids must be a list of token ids",
    "SamplingParams(logit_bias=[1])": "logit_bias must be a dict",
    "params.to_dict()": "msgspec.structs.asdict",
    "setattr(params.clone(), 'temprature', 1)": "did you mean temperature",
    "BeamSearchParams(beam_width=2)": "BeamSearchParams needs max_tokens",
    "BeamSearchParams(beam_width=2, max_tokens=2, n=1)": "there are beam_width",
    "StructuredOutputsParams(jsn={})": "did you mean json",
    "StructuredOutputsParams(json={}, backend='xgrammar')": "Quire has one backend",
}


@pytest.fixture(scope="module")
def names() -> Iterator[dict]:
    small = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "cpu_kv_cache_gib": 0.05}
    found: dict = {}
    for line in IMPORTS.split("\n"):
        exec(line, found)
    exec("import argparse, copy, dataclasses, inspect, msgspec, pickle, torch, numpy as np", found)
    exec("from quire.sampling_params import StructuredOutputsParams", found)
    exec("from quire.logger import init_logger", found)
    exec("from quire.model_executor import set_random_seed", found)
    with LLM.from_engine_args(EngineArgs(**small)) as llm:
        yield {**found, "llm": llm, "params": SamplingParams(max_tokens=2, ignore_eos=True)}


@pytest.mark.parametrize("line", IMPORTS.strip().split("\n"))
def test_what_scripts_import_can_be_imported(line):
    exec(line, {})


@pytest.mark.parametrize("call", WORKS.strip().split("\n"))
def test_an_idiom_works(names, call):
    assert eval(call, dict(names)) is not False


@pytest.mark.parametrize("call", SAYS)
def test_an_idiom_says_why_it_does_not_work(names, call):
    with pytest.raises(Exception) as error:
        eval(call, dict(names))
    assert type(error.value) not in (AttributeError, TypeError)
    assert SAYS[call] in str(error.value)


def test_a_typing_error_stays_one(names):
    assert not hasattr(names["llm"], "generat") and not hasattr(names["llm"].llm_engine, "step_")
    with pytest.raises(ImportError):
        exec("from quire.sampling_params import SamplngParams", {})
    with pytest.raises(ModuleNotFoundError):
        exec("import quire.sampling_parms", {})
