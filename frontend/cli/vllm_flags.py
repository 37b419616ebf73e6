"""Every flag of `vllm serve`, and some of older versions that launch lines still have, as data: how Quire treats it.

A flag that `quire serve` knows works regardless of this file: WORKING only lists such names, for the documentation. The others
have a row: values that are accepted without effect (all of them, or vLLM's default, which is how Quire works), the reason, and
the nearest flag or alternative. vllm_compat.py applies the rows; docs are generated from `verdicts`. Names as in vLLM 0.33.
"""

from typing import Literal, NamedTuple

Kind = Literal["switch", "value", "list", "json"]  # no value (also --no-x), one word, several words, a JSON object

WORKING = """
--runner --convert --pooler-config --override-pooler-config
--model --tokenizer --tokenizer-revision --revision --download-dir --hf-token --hf-overrides --served-model-name --dtype
--load-format --model-impl --quantization -q --max-model-len --max-logprobs --seed --enforce-eager --chat-template
--generation-config --override-generation-config --tensor-parallel-size -tp --pipeline-parallel-size -pp
--enable-expert-parallel -ep --data-parallel-size -dp --gpu-memory-utilization --distributed-executor-backend
--kv-cache-memory-bytes --num-gpu-blocks-override --kv-cache-dtype --kv-cache-dtype-skip-layers --mamba-ssm-cache-dtype
--block-size --enable-prefix-caching --max-num-seqs --max-num-batched-tokens --max-num-queued-reqs --max-num-queued-tokens
--long-prefill-token-threshold --scheduling-policy --enable-log-requests --disable-log-stats --device --host --port --api-key
--allowed-origins --allowed-methods --allowed-headers --allow-credentials --api-server-count -asc --config
--uvicorn-log-level --disable-uvicorn-access-log --disable-access-log-for-endpoints --shutdown-timeout --response-role
--chat-template-content-format --default-chat-template-kwargs --trust-request-chat-template --return-tokens-as-token-ids
--enable-force-include-usage --enable-request-id-headers --h11-max-header-count --h11-max-incomplete-event-size
--tool-call-parser --reasoning-parser --otlp-traces-endpoint --logits-processors --profiler-config --uds --root-path
--ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-cert-reqs --ssl-ciphers --enable-ssl-refresh --disable-fastapi-docs
 --limit-mm-per-prompt --mm-processor-kwargs --mm-processor-cache-gb --allowed-media-domains --allowed-local-media-path
 --trust-request-mm-kwargs
 --enable-lora --lora-modules --max-loras --max-lora-rank --max-cpu-loras --lora-target-modules --lora-dtype
 --language-model-only --speculative-config -sc --spec-method --spec-model --spec-tokens --per-request-spec-decode-metrics
"""


class Row(NamedTuple):
    """flags: names with this row in common. fine: values accepted without effect; "*": any; for a switch "on" and "off"; for a
    JSON object the whole of it, or key=value for each member that may be present."""

    flags: str
    kind: Kind
    fine: tuple[str, ...]
    why: str  # why it has no effect, or no support
    nearest: str = ""  # a flag or another way, if there is one


ANY = ("*",)
OFF, ON = ("off",), ("on",)
_NO_IO = "an image is decoded in one way"
_MEDIA_CACHE = "each HTTP process keeps what it has preprocessed, by SHA-256"
_ENCODERS = "encoders compute in the model's dtype"
_LORA = "adapters are split and multiplied one way"
_MOE = "whole experts are distributed in order, or each is split, over the tensor-parallel ranks"
_DP = "replicas know nothing of each other, and are all of one host"
_HOSTS = "other hosts run `quire host`, and one `quire serve` names them"
_AGENTS = "--hosts FILE, or --distributed-executor-backend ray"
_RAY, _BY_RAY = "Ray is used where it is asked for by name", "--distributed-executor-backend ray"
_MAMBA = "state-space models are not served"
_OFFLOAD = "weights and KV cache stay on the GPU"
_STRAIGHT = "weights go straight to the device"
_WHOLE = "sequences stay together"
_AHEAD = "a step is always made while the last one runs"
_KERNELS = "kernels are Quire's own, tuned ahead"
_CODE = "no code of others is loaded into the server"
_QUANTIZED = "a checkpoint says how it is quantized, and weights of floats are quantized one way in all layers"
_MEASURES = "this is not measured"
_TEXTS = "no prompt's or answer's text is ever logged"
_TP = "--tensor-parallel-size"
_REPLICAS = "--data-parallel-size; on other hosts `enginecore` there and `quire route` before them"
_STEP = "--max-num-batched-tokens"
_PROXY = "a reverse proxy before the server"

_GRAMMARS = (
    *(f"backend={name}" for name in ("auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer")),
    "reasoning_parser=*", "disable_fallback=true", "disable_fallback=false", "disable_any_whitespace=false",
    "disable_additional_properties=false",
    "enable_in_reasoning=false",
)  # fmt: skip

ROWS = (
    # ---------------------------------------------------------------------------------------------------- the server
    Row("--max-log-len", "value", ANY, _TEXTS),
    Row("--enable-log-outputs", "switch", ANY, _TEXTS, "--enable-log-requests"),
    Row("--enable-log-deltas", "switch", ANY, _TEXTS),
    Row("--disable-log-requests", "switch", ANY, "requests are logged by --enable-log-requests only"),
    Row("--log-error-stack", "switch", ON, "an error of the server's own is logged with its stack"),
    Row("--log-config-file", "value", ANY, "logs have one form", "--log-level, --log-format"),
    Row("--aggregate-engine-logging", "switch", ANY, "there is one engine, and one line for it"),
    Row("--enable-server-load-tracking", "switch", ANY, "/load and /metrics always have the load"),
    Row("--enable-prompt-tokens-details", "switch", ON, "usage always has prompt_tokens_details"),
    Row("--enable-per-request-metrics", "switch", OFF, "answers hold no timings", "/metrics"),
    Row("--enable-tokenizer-info-endpoint", "switch", ON, "/tokenizer_info is always there"),
    Row("--enable-auto-tool-choice", "switch", ON, "calls are read by --tool-call-parser", "--tool-call-parser none"),
    Row("--exclude-tools-when-tool-choice-none", "switch", ON, "prompts show no tools that may not be called"),
    Row("--tool-parser-plugin", "value", (), _CODE, "--tool-call-parser"),
    Row("--reasoning-parser-plugin", "value", (), _CODE, "--reasoning-parser"),
    Row("--io-processor-plugin", "value", (), _CODE),
    Row("--tool-server", "value", (), "tools are the client's to call"),
    Row("--reasoning-config", "json", (), "what thoughts begin and end with is the parser's to know", "--reasoning-parser"),
    Row("--middleware", "value", (), _CODE, _PROXY),
    Row("--sse-keep-alive-interval", "value", ("0",), "streams send what the model says", "a longer time-out of the proxy"),
    Row("--enable-offline-docs", "switch", ON, "/docs needs nothing from elsewhere"),
    Row("--fingerprint-mode", "value", ("none",), "answers have no fingerprint of the server", "none"),
    Row("--fingerprint-value", "value", (), "answers have no fingerprint of the server"),
    Row("--tokens-only", "switch", OFF, "all routes are served", "/inference/v1/generate"),
    Row("--grpc", "switch", OFF, "HTTP is served"),
    Row("--headless", "switch", OFF, "an engine without a server is a command of its own", "enginecore --listen ADDRESS"),
    Row("--disable-frontend-multiprocessing", "switch", ANY, "the engine is always a process of its own"),
    Row("--enable-flash-late-interaction", "switch", ANY, "scores by token vectors are not served"),
    Row("--cohere-is-reasoning-model", "switch", ANY, "Cohere's chat routes are not served"),
    Row("--cohere-format", "value", ANY, "Cohere's chat routes are not served"),
    Row("--data-parallel-supervisor-port --dp-supervisor-probe-interval-s --dp-supervisor-probe-timeout-s", "value", ANY, _DP),
    Row("--dp-supervisor-probe-failure-threshold", "value", ANY, _DP),
    # ----------------------------------------------------------------------------------------------------- the model
    Row("--trust-remote-code", "switch", ANY, "no code of a checkpoint is ever run, and none is needed"),
    Row("--code-revision", "value", ANY, "no code of a checkpoint is ever run, and none is needed"),
    Row("--tokenizer-mode", "value", ("auto", "hf", "slow", "mistral"), "a tokenizer.json is used, or made", "auto"),
    Row("--skip-tokenizer-init", "switch", OFF, "the tokenizer is always there", "prompts of token ids"),
    Row("--task", "value", ("auto", "generate"), "--runner and --convert say it: pooling, embed, classify"),
    Row("--model-class-overrides", "json", (), _CODE),
    Row("--config-format", "value", ("auto", "hf", "mistral"), "models are read in Hugging Face's format", "auto"),
    Row("--hf-config-path", "value", (), "config.json is the model's", "--hf-overrides"),
    Row("--quantization-config", "json", (), _QUANTIZED, "--quantization"),
    Row("--quantization-param-path", "value", (), "scales of keys and values are the checkpoint's"),
    Row("--allow-deprecated-quantization", "switch", ANY, "no method is deprecated"),
    Row("--override-attention-dtype", "value", (), "attention has the model's type", "--dtype"),
    Row("--logprobs-mode", "value", ("raw_logprobs",), "logprobs are those before penalties and temperature", "raw_logprobs"),
    Row("--use-fp64-gumbel --return-sampling-mask --enable-trace-replay", "switch", OFF, "there is one way to sample"),
    Row("--enable-return-routed-experts", "switch", OFF, "which experts were chosen is not told"),
    Row("--enable-prompt-embeds", "switch", OFF, "prompts are texts or token ids"),
    Row("--enable-sleep-mode --enable-cumem-allocator --enable-nccl-comm-suspend", "switch", OFF, "engines do not sleep"),
    Row("--disable-sliding-window", "switch", OFF, "windows are the model's", "--max-model-len"),
    Row("--disable-cascade-attn", "switch", ON, "there is no cascade attention"),
    Row("--renderer-num-workers --tokenizer-pool-size", "value", ANY, "texts are tokenized in threads of each frontend"),
    Row("--tokenizer-pool-type --tokenizer-pool-extra-config", "value", ANY, "texts are tokenized in threads of each frontend"),
    Row("--structured-outputs-config", "json", _GRAMMARS, "llguidance makes the masks", "the request's structured_outputs"),
    Row("--guided-decoding-backend", "value", ANY, "llguidance makes the masks"),
    Row("--guided-decoding-disable-fallback", "switch", ANY, "llguidance makes the masks"),
    Row("--guided-decoding-disable-any-whitespace --guided-decoding-disable-additional-properties", "switch", OFF,
        "llguidance makes the masks", "the request's structured_outputs"),
    Row("--logits-processor-pattern", "value", (), "requests name no classes", "--logits-processors"),
    Row("--enable-reasoning", "switch", ON, "thoughts are read by --reasoning-parser", "--reasoning-parser none"),
    Row("--additional-config", "json", (), "there are no plugins of platforms"),
    # -------------------------------------------------------------------------------------------------------- loading
    Row("--ignore-patterns", "list", ANY, "nothing but what is served is downloaded"),
    Row("--use-tqdm-on-load", "switch", ANY, "loading takes seconds and shows no bar"),
    Row("--pt-load-map-location", "value", ANY, "weights are read from safetensors only"),
    Row("--model-loader-extra-config", "json", ANY, "there is one loader, and nothing to set"),
    Row("--safetensors-load-strategy", "value", ("lazy", "eager", "prefetch", "None"), _STRAIGHT),
    Row("--safetensors-prefetch-num-threads --safetensors-prefetch-block-size", "value", ANY, _STRAIGHT),
    Row("--max-parallel-loading-workers", "value", ANY, _STRAIGHT),
    # ------------------------------------------------------------------------------------- several GPUs, several hosts
    Row("--prefill-context-parallel-size -pcp", "value", ("1",), _WHOLE, _TP),
    Row("--decode-context-parallel-size -dcp", "value", ANY, "each of the tensor-parallel GPUs keeps whole sequences"),
    Row("--dcp-comm-backend --dcp-kv-cache-interleave-size --cp-kv-cache-interleave-size", "value", ANY, _WHOLE),
    Row("--dcp-q-replicate --enable-batch-sharded-sampling", "switch", OFF, _WHOLE),
    Row("--data-parallel-size-local -dpl --data-parallel-rpc-port -dpp", "value", ANY, "all replicas are of this host"),
    Row("--data-parallel-rank -dpn --data-parallel-start-rank -dpr", "value", ("0",), _DP, _REPLICAS),
    Row("--data-parallel-address -dpa", "value", ("127.0.0.1", "localhost"), _DP, _REPLICAS),
    Row("--data-parallel-backend -dpb", "value", ("mp",), _DP, _REPLICAS),
    Row("--data-parallel-hybrid-lb -dph --data-parallel-external-lb -dpe", "switch", OFF, _DP, _REPLICAS),
    Row("--data-parallel-multi-port-external-lb -dpm", "switch", OFF, _DP, _REPLICAS),
    Row("--dp-sync-interval", "value", ANY, _DP),
    Row("--disable-nccl-for-dp-synchronization", "switch", ANY, _DP),
    Row(
        "--distributed-timeout-seconds --cpu-distributed-timeout-seconds",
        "value",
        ANY,
        "a worker that hangs is replaced",
        "--collective-timeout-s",
    ),
    Row("--nnodes -n", "value", ("1",), _HOSTS, _AGENTS),
    Row("--node-rank -r", "value", ("0",), _HOSTS, _AGENTS),
    Row("--master-addr", "value", ("127.0.0.1", "localhost"), _HOSTS, _AGENTS),
    Row("--master-port", "value", ("29501",), _HOSTS, _AGENTS),
    Row("--device-ids", "value", (), "the first GPUs are used", "CUDA_VISIBLE_DEVICES"),
    Row("--numa-bind", "switch", OFF, "processes are not bound", "numactl before the command"),
    Row("--numa-bind-nodes --numa-bind-cpus", "list", (), "processes are not bound", "numactl before the command"),
    Row("--worker-use-ray --engine-use-ray --ray-workers-use-nsight", "switch", OFF, _RAY, _BY_RAY),
    Row("--disable-custom-all-reduce", "switch", ANY, "the tuning table says which exchange is used"),
    Row("--enable-ep-weight-filter", "switch", ANY, "a rank reads its own experts' weights only"),
    Row("--enable-elastic-ep", "switch", OFF, _MOE, "--enable-expert-parallel"),
    Row("--enable-eplb --eplb-log-balancedness", "switch", ANY, "experts stay on the GPUs that they were given"),
    Row("--eplb-config", "json", ANY, "experts stay on the GPUs that they were given"),
    Row("--num-redundant-experts --eplb-window-size --eplb-step-interval", "value", ANY,
        "experts stay on the GPUs that they were given"),
    Row("--ir-op-priority --kernel-config", "json", ANY, _KERNELS),
    Row("--expert-placement-strategy --moe-backend", "value", ANY, _MOE),
    Row("--all2all-backend", "value", ANY, "tokens stay where they are: all ranks have them"),
    Row("--enable-dbo", "switch", ANY, "batches are not split in two"),
    Row("--ubatch-size", "value", ANY, "batches are not split in two"),
    Row("--dbo-decode-token-threshold --dbo-prefill-token-threshold", "value", ANY, "batches are not split in two"),
    Row("--worker-cls", "value", ("auto",), _CODE),
    Row("--worker-extension-cls", "value", ("",), _CODE),
    Row("--enable-fault-tolerance", "switch", ON, "what dies is started again"),
    Row("--fault-tolerance-config", "json", ANY, "what dies is started again"),
    # ------------------------------------------------------------------------------------------------------- KV cache
    Row("--calculate-kv-scales", "switch", OFF, "scales of keys and values are the checkpoint's, or 1.0"),
    Row("--prefix-caching-hash-algo", "value", ANY, "hashes have a key of the process's own, and no collisions to fear"),
    Row("--prefix-cache-retention-interval", "value", ("0",), "blocks stay until their memory is needed"),
    Row("--prefix-match-unit", "value", (), "prefixes are shared by whole blocks", "--block-size"),
    Row("--kv-sharing-fast-prefill", "switch", OFF, "layers have caches of their own"),
    Row("--mamba-block-size --mamba-cache-dtype --mamba-cache-mode", "value", ANY, _MAMBA),
    Row("--mamba-backend --mamba-ssu-algorithm --mamba-cache-philox-rounds --replayssm-buffer-len", "value", ANY, _MAMBA),
    Row("--gdn-prefill-backend --kda-prefill-backend", "value", ANY, _MAMBA),
    Row("--use-replayssm --enable-mamba-cache-stochastic-rounding", "switch", OFF, _MAMBA),
    Row("--swap-space", "value", ANY, "who is preempted is computed anew, not swapped"),
    Row("--kv-offloading-size --cpu-offload-gb --offload-group-size", "value", ("0",), _OFFLOAD, "--gpu-memory-utilization"),
    Row("--kv-offloading-backend --offload-backend --offload-num-in-group --offload-prefetch-step", "value", ANY, _OFFLOAD),
    Row("--cpu-offload-params --offload-params", "list", (), _OFFLOAD, "--dtype"),
    Row("--kv-transfer-config --kv-events-config --ec-transfer-config --ec-manager-config", "json", (),
        "KV blocks stay in their engine"),
    Row("--weight-transfer-config", "json", (), "weights are read once"),
    # ------------------------------------------------------------------------------------------------------ multimodal
    Row("--media-io-kwargs", "json", ANY, _NO_IO),
    Row("--mm-processor-cache-type --mm-hasher-algorithm", "value", ANY, _MEDIA_CACHE, "--mm-processor-cache-gb"),
    Row("--mm-encoder-tp-mode", "value", ("weights", "data"), "every rank encodes all images"),
    Row("--mm-shm-cache-max-object-size-mb", "value", ANY, _MEDIA_CACHE),
    Row("--mm-encoder-attn-backend", "value", ANY, _KERNELS),
    Row("--mm-encoder-attn-dtype --mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-path", "value", ANY, _ENCODERS),
    Row("--mm-encoder-fp8-scale-save-margin", "value", ANY, _ENCODERS),
    Row("--video-pruning-rate --video-pruning-method", "value", ANY, "videos are not taken"),
    Row("--mm-tensor-ipc --mm-processor-device --mm-ipc-gpu-memory-gb", "value", ANY, "processors run in processes of the CPU"),
    Row("--skip-mm-profiling", "switch", ANY, "the encoder's memory is always measured"),
    Row("--interleave-mm-strings", "switch", ANY, "images stand in a prompt where messages have them"),
    Row("--mm-device-do-normalize", "switch", ANY, "the device normalizes"),
    Row("--disable-chunked-mm-input", "switch", ANY, "images are encoded before the step that reads them"),
    Row("--disable-mm-preprocessor-cache", "switch", OFF, _MEDIA_CACHE, "--mm-processor-cache-gb 0"),
    Row("--enable-mm-embeds --mm-encoder-only", "switch", OFF, "images come as images"),
    # ------------------------------------------------------------------------------------------------------------ LoRA
    Row("--fully-sharded-loras --specialize-active-lora --enable-mixed-moe-lora-format", "switch", ANY, _LORA),
    Row("--enable-tower-connector-lora", "switch", OFF, "encoders of images have no adapters"),
    Row("--enable-moe-shared-loras", "switch", OFF, "each adapter has all of its tensors"),
    Row("--lora-extra-vocab-size", "value", (), "an adapter with tokens of its own is merged into the model"),
    Row("--default-mm-loras", "json", (), "a request names its adapter"),
    # ------------------------------------------------------------------------------------------------------ scheduling
    Row("--enable-chunked-prefill", "switch", ON, "long prompts are always computed in chunks", _STEP),
    Row("--async-scheduling", "switch", ON, _AHEAD),
    Row("--disable-hybrid-kv-cache-manager", "switch", OFF, "layers with windows have blocks of their own"),
    Row("--scheduler-reserve-full-isl", "switch", ON, "admission looks ahead to a request's end", "--admission optimistic"),
    Row("--watermark", "value", ("0", "0.0"), "admission looks ahead to a request's end", "--admission"),
    Row("--max-num-scheduled-tokens", "value", (), "a step has one limit", _STEP),
    Row("--max-num-partial-prefills --max-long-partial-prefills", "value", ANY, "a step has chunks of many prompts"),
    Row("--prefill-schedule-interval", "value", ("1",), "prompts are spread over steps by what these take", _STEP),
    Row("--stream-interval", "value", ANY, "each token is sent when it is there"),
    Row("--scheduler-cls", "value", (), _CODE, "--scheduling-policy"),
    Row("--num-scheduler-steps", "value", ANY, _AHEAD),
    Row("--multi-step-stream-outputs --disable-async-output-proc", "switch", ANY, _AHEAD),
    Row("--scheduler-delay-factor --num-lookahead-slots", "value", ANY, "a step waits for nothing but the one before"),
    Row("--preemption-mode", "value", ("recompute",), "who is preempted is computed anew", "recompute"),
    Row("--use-v2-block-manager", "switch", ANY, "there is one block manager"),
    Row("--diffusion-config -dc", "json", (), "models of text that is made token by token are served"),
    Row("--speculative-model", "value", (), "it is a key of --speculative-config", "--spec-model"),
    Row("--num-speculative-tokens", "value", (), "it is a key of --speculative-config", "--spec-tokens"),
    # ------------------------------------------------------------------------------------------------ kernels, compiling
    Row("--compilation-config -cc --attention-config -ac", "json", ANY, _KERNELS, "--enforce-eager"),
    Row("--optimization-level -O", "value", ANY, _KERNELS, "--enforce-eager"),
    Row("--performance-mode --attention-backend --linear-backend", "value", ANY, _KERNELS),
    Row("--enable-flashinfer-autotune --enable-bf16x3-router-gemm", "switch", ANY, _KERNELS),
    Row("--cudagraph-capture-sizes --cuda-graph-sizes", "list", ANY, "graphs are captured for what steps need"),
    Row("--max-cudagraph-capture-size --max-seq-len-to-capture", "value", ANY, "graphs are captured for what steps need"),
    Row("--max-context-len-to-capture", "value", ANY, "graphs are captured for what steps need"),
    # ------------------------------------------------------------------------------------------------ metrics, profiles
    Row("--collect-detailed-traces", "list", ANY, "a request has one span, with all its times"),
    Row("--show-hidden-metrics-for-version", "value", ANY, "no metric is hidden"),
    Row("--kv-cache-metrics --cudagraph-metrics --enable-mfu-metrics", "switch", ANY, _MEASURES, "/metrics"),
    Row("--kv-cache-metrics-sample", "value", ANY, _MEASURES),
    Row("--enable-layerwise-nvtx-tracing --enable-logging-iteration-details", "switch", OFF, _MEASURES, "/metrics"),
    Row("--jit-monitor-mode", "value", ANY, "kernels that were compiled are logged"),
    Row("--jit-monitor-verbose --fail-on-environ-validation", "switch", OFF, "vLLM's environment variables mean nothing here"),
    # -------------------------------------------------------------------------------------------- of its latest versions
    Row("--sparse-indexer-topk-backend --kda-decode-backend", "value", ANY, _KERNELS),
    Row("--enable-hc-sp --monokernel", "switch", ANY, _KERNELS),
    Row("--enable-scale-out", "switch", ANY, "/inference/v1/generate and /tokenize are always there"),
    Row("--enable-shm-tensor-arena", "switch", ANY, "only token ids go between processes"),
    Row("--watchdog-config", "json", ANY, "a worker that hangs is replaced", "--step-timeout-s"),
    Row("--custom-histogram-buckets", "json", (), "buckets are vLLM's defaults, which its boards expect", "/metrics"),
    Row("--logging-config", "json", (), "lines are this server's", "--log-level, --log-format"),
    Row("--reasoning-effort-map --aux-output-config --engram-config", "json", (), "no model here needs it",
        "--default-chat-template-kwargs"),
    Row("--anthropic-disabled-thinking-effort", "value", (), "it is a request's to say", "--default-chat-template-kwargs"),
    Row("--tool-strict-level", "value", (), "each tool says whether it is strict", "strict in the tool"),
    Row("--watermark-config", "json", (), "texts bear no watermark"),
    Row("--grpc-port", "value", (), "requests come by HTTP, or from Python by ZeroMQ", "--port"),
    Row("--device-memory-utilization", "value", (), "it is called otherwise", "--gpu-memory-utilization"),
    Row("--max-num-active-seqs", "value", (), "it is called otherwise", "--max-num-seqs"),
    Row("--long-prefill-token-threshold-adaptive", "switch", OFF, "it is a number", "--long-prefill-token-threshold"),
    Row("--enable-mamba-shared-prefix-checkpoint --swa-bounded-replay", "switch", OFF, "prefixes are shared by whole blocks"),
    Row("--sleep-mode-backend --sleep-preserve-parameter-names", "list", (), "engines do not sleep"),
    Row("--sleep-mode-offload-cudagraph", "switch", OFF, "engines do not sleep"),
    Row("--elastic-ep-max-dp-size --max-lora-cls-labels", "value", (), "neither ranks nor labels come and go"),
)  # fmt: skip

BY_FLAG = {flag: row for row in ROWS for flag in row.flags.split()}


class Verdict(NamedTuple):
    """A line of the documentation. status: works, nothing (has no effect), some (values have no effect), no (not supported)."""

    flag: str
    status: Literal["works", "nothing", "some", "no"]
    text: str


def verdicts(works_as: dict[str, str]) -> list[Verdict]:
    """All flags, by name. works_as: the flags that `quire serve` knows, each with its name there."""
    found = []
    for flag in sorted({*WORKING.split(), *BY_FLAG}):
        if flag in works_as:
            found.append(Verdict(flag, "works", "" if works_as[flag] == flag else f"as {works_as[flag]}"))
            continue
        row = BY_FLAG[flag]
        nearest = f"; nearest: {row.nearest}" if row.nearest else ""
        if row.fine in (ANY, ("on", "off")):
            found.append(Verdict(flag, "nothing", row.why))
        else:
            found.append(Verdict(flag, "some" if row.fine else "no", row.why + nearest))
    return found
