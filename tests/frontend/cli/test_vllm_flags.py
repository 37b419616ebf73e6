"""vLLM's launch lines: every flag of `vllm serve` works here, needs nothing, or is refused with a reason and a way."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launch_lines import parsed, serve_parser

from quire.frontend.cli import main as cli
from quire.frontend.cli.serve_command import _take_profiler_config
from quire.frontend.cli.vllm_compat import UnsupportedFlag, is_fine, nearest, take_out, unread_variables
from quire.frontend.cli.vllm_flags import ANY, BY_FLAG, ROWS, WORKING, verdicts
from quire.frontend.client.engine_args import EngineArgs

# `vllm serve --help=all` of 0.30, without --no- forms
VLLM_SERVE = """
--headless --api-server-count -asc --config --grpc --lora-modules --chat-template --chat-template-content-format
--trust-request-chat-template --default-chat-template-kwargs --response-role --return-tokens-as-token-ids
--enable-auto-tool-choice --exclude-tools-when-tool-choice-none --tool-call-parser --tool-parser-plugin --tool-server
--log-config-file --max-log-len --enable-prompt-tokens-details --enable-per-request-metrics
--enable-server-load-tracking --enable-force-include-usage --enable-tokenizer-info-endpoint --enable-log-outputs
--enable-log-deltas --cohere-is-reasoning-model --cohere-format --log-error-stack --tokens-only --fingerprint-mode
--fingerprint-value --host --port --data-parallel-supervisor-port --dp-supervisor-probe-interval-s
--dp-supervisor-probe-timeout-s --dp-supervisor-probe-failure-threshold --uds --uvicorn-log-level
--disable-uvicorn-access-log --disable-access-log-for-endpoints --allow-credentials --allowed-origins --allowed-methods
--allowed-headers --api-key --ssl-keyfile --ssl-certfile --ssl-ca-certs --enable-ssl-refresh --ssl-cert-reqs
--ssl-ciphers --root-path --middleware --enable-request-id-headers --disable-fastapi-docs
--h11-max-incomplete-event-size --h11-max-header-count --enable-offline-docs --enable-flash-late-interaction
--sse-keep-alive-interval --model --runner --convert --tokenizer --tokenizer-mode --trust-remote-code --dtype --seed
--hf-config-path --allowed-local-media-path --allowed-media-domains --revision --code-revision --tokenizer-revision
--max-model-len --quantization -q --quantization-config --allow-deprecated-quantization --enforce-eager
--enable-return-routed-experts --return-sampling-mask --max-logprobs --logprobs-mode --use-fp64-gumbel
--enable-trace-replay --disable-sliding-window --disable-cascade-attn --skip-tokenizer-init --enable-prompt-embeds
--served-model-name --config-format --hf-token --hf-overrides --model-class-overrides --pooler-config
--generation-config --override-generation-config --enable-sleep-mode --enable-cumem-allocator --enable-nccl-comm-suspend
--model-impl --logits-processors --io-processor-plugin --renderer-num-workers --override-attention-dtype --load-format
--download-dir --safetensors-load-strategy --safetensors-prefetch-num-threads --safetensors-prefetch-block-size
--model-loader-extra-config --ignore-patterns --use-tqdm-on-load --pt-load-map-location --attention-backend
--mamba-backend --mamba-ssu-algorithm --enable-mamba-cache-stochastic-rounding --mamba-cache-philox-rounds
--reasoning-parser --reasoning-parser-plugin --distributed-executor-backend --pipeline-parallel-size -pp --master-addr
--master-port --nnodes -n --node-rank -r --distributed-timeout-seconds --cpu-distributed-timeout-seconds --numa-bind
--numa-bind-nodes --numa-bind-cpus --device-ids --tensor-parallel-size -tp --decode-context-parallel-size -dcp
--dcp-comm-backend --dcp-q-replicate --dcp-kv-cache-interleave-size --cp-kv-cache-interleave-size
--prefill-context-parallel-size -pcp --data-parallel-size -dp --data-parallel-rank -dpn --data-parallel-start-rank -dpr
--data-parallel-size-local -dpl --data-parallel-address -dpa --data-parallel-rpc-port -dpp --data-parallel-backend -dpb
--data-parallel-hybrid-lb -dph --data-parallel-external-lb -dpe --data-parallel-multi-port-external-lb -dpm
--enable-expert-parallel -ep --enable-batch-sharded-sampling --enable-ep-weight-filter --all2all-backend --enable-dbo
--ubatch-size --enable-elastic-ep --dbo-decode-token-threshold --dp-sync-interval --dbo-prefill-token-threshold
--disable-nccl-for-dp-synchronization --enable-eplb --eplb-config --expert-placement-strategy
--max-parallel-loading-workers --ray-workers-use-nsight --disable-custom-all-reduce --worker-cls --worker-extension-cls
--enable-fault-tolerance --fault-tolerance-config --block-size --gpu-memory-utilization --kv-cache-memory-bytes
--kv-cache-dtype --num-gpu-blocks-override --enable-prefix-caching --prefix-caching-hash-algo
--prefix-cache-retention-interval --kv-cache-dtype-skip-layers --calculate-kv-scales --kv-sharing-fast-prefill
--mamba-cache-dtype --mamba-ssm-cache-dtype --mamba-block-size --prefix-match-unit --mamba-cache-mode
--replayssm-buffer-len --use-replayssm --kv-offloading-size --kv-offloading-backend --offload-backend --cpu-offload-gb
--cpu-offload-params --offload-group-size --offload-num-in-group --offload-prefetch-step --offload-params
--language-model-only --limit-mm-per-prompt --enable-mm-embeds --media-io-kwargs --mm-processor-kwargs
--mm-processor-cache-gb --mm-processor-cache-type --mm-hasher-algorithm --mm-shm-cache-max-object-size-mb
--mm-encoder-only --mm-encoder-tp-mode --mm-encoder-attn-backend --mm-encoder-attn-dtype --mm-encoder-fp8-scale-path
--mm-encoder-fp8-scale-save-path --mm-encoder-fp8-scale-save-margin --interleave-mm-strings --skip-mm-profiling
--video-pruning-rate --video-pruning-method --mm-tensor-ipc --mm-processor-device --mm-ipc-gpu-memory-gb
--mm-device-do-normalize --enable-lora --max-loras --max-lora-rank --lora-dtype --enable-tower-connector-lora
--max-cpu-loras --fully-sharded-loras --lora-target-modules --default-mm-loras --specialize-active-lora
--enable-mixed-moe-lora-format --enable-moe-shared-loras --show-hidden-metrics-for-version --otlp-traces-endpoint
--collect-detailed-traces --per-request-spec-decode-metrics --kv-cache-metrics --kv-cache-metrics-sample
--cudagraph-metrics --enable-layerwise-nvtx-tracing --enable-mfu-metrics --enable-logging-iteration-details
--jit-monitor-mode --jit-monitor-verbose --max-num-batched-tokens --max-num-scheduled-tokens --max-num-seqs
--max-num-queued-reqs --max-num-queued-tokens --long-prefill-token-threshold --scheduling-policy
--enable-chunked-prefill --disable-chunked-mm-input --scheduler-cls --scheduler-reserve-full-isl --watermark
--prefill-schedule-interval --disable-hybrid-kv-cache-manager --async-scheduling --stream-interval
--cudagraph-capture-sizes --max-cudagraph-capture-size --ir-op-priority --enable-flashinfer-autotune
--enable-bf16x3-router-gemm --moe-backend --linear-backend --speculative-config -sc --spec-method --spec-model
--spec-tokens --diffusion-config -dc --kv-transfer-config --kv-events-config --ec-transfer-config --ec-manager-config
--compilation-config -cc --attention-config -ac --reasoning-config --kernel-config --additional-config
--structured-outputs-config --profiler-config --optimization-level --performance-mode --weight-transfer-config
--disable-log-stats --aggregate-engine-logging --fail-on-environ-validation --shutdown-timeout --gdn-prefill-backend
--kda-prefill-backend --enable-log-requests
"""
VLLM = VLLM_SERVE.split()


KNOWN = serve_parser().actions()


def test_every_flag_of_vllm_has_its_place():
    assert len(VLLM) == len(set(VLLM)) > 270
    assert [flag for flag in VLLM if flag not in KNOWN and flag not in BY_FLAG] == []
    assert [flag for flag in WORKING.split() if flag not in KNOWN] == []
    names = [flag for row in ROWS for flag in row.flags.split()]
    assert len(names) == len(set(names)) and not set(names) & set(WORKING.split())


def test_the_table_is_a_page():
    works_as = {flag: max(action.option_strings[0], flag, key=len) for flag, action in KNOWN.items()}
    found = {verdict.flag: verdict for verdict in verdicts(works_as)}
    assert set(VLLM) <= set(found)
    assert found["--api-server-count"].status == found["--dtype"].status == "works"
    assert found["--enable-chunked-prefill"].status == "some" and found["--trust-remote-code"].status == "nothing"
    assert found["--lora-modules"].status == "works" and found["--max-num-queued-tokens"].status == "works"
    assert all(verdict.text or verdict.status == "works" for verdict in found.values())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.flags.split()[0])
def test_every_row_does_what_it_says(row):
    for flag in row.flags.split():
        if flag in KNOWN:
            continue  # the parser's own by now
        forms = _forms(flag, row)
        for value, words in forms:
            fine = row.fine == ANY or value in row.fine
            if fine:
                left, taken = take_out(["a", *words, "--port", "1"], KNOWN)
                assert left == ["a", "--port", "1"] and taken[0].startswith(words[0].partition("=")[0]) and row.why in taken[0]
            else:
                with pytest.raises(UnsupportedFlag, match="is not supported") as error:
                    take_out(["a", *words], KNOWN)
                assert row.why in str(error.value) and row.nearest in str(error.value)


def _forms(flag, row):
    if row.kind == "switch":
        negative = [("off", [f"--no-{flag[2:]}"])] if flag.startswith("--") else []
        return [("on", [flag]), *negative]
    values = [*(v for v in row.fine if v not in ("*", "")), "something"]
    return [(value, words) for value in values for words in ([flag, value], [f"{flag}={value}"])]


def test_dotted_keys_levels_and_negative_numbers():
    assert take_out(["--compilation-config.mode", "3", "-cc.x=1", "-O3", "-O", "2"], KNOWN)[0] == []
    assert take_out(["--max-model-len", "-1", "--nnodes", "1"], KNOWN)[0] == ["--max-model-len", "-1"]
    for words in (["--diffusion-config.model", "x"], ["-dc.model=x"], ['--diffusion-config={"a":1}'], ["--nnodes", "-1"]):
        with pytest.raises(UnsupportedFlag, match="is not supported"):
            take_out(words, KNOWN)
    with pytest.raises(UnsupportedFlag, match="needs a value"):
        take_out(["--nnodes"], KNOWN)
    assert take_out(["--", "--nnodes", "2"], KNOWN) == (["--", "--nnodes", "2"], [])


def test_a_word_behind_a_switch_as_older_launch_lines_have_it():
    switches = ["--enable-mm-embeds=false", "--no-enable-mm-embeds=true"]
    words = ["--enable-chunked-prefill", "True", "m", *switches, "--trust-remote-code"]
    left, taken = take_out(words, KNOWN)
    assert left == ["m"]
    assert [text.split()[0] for text in taken] == [words[0], "--no-enable-mm-embeds", "--no-enable-mm-embeds", words[-1]]


@given(st.lists(st.sampled_from(["a", "-1", "--port", "--enable-chunked-prefill", "--max-log-len", "3", "--x-y", "--port=2"])))
def test_other_words_stay_in_their_order(words):
    try:
        left, taken = take_out(words, KNOWN)
    except UnsupportedFlag as error:
        assert "needs a value" in str(error)
        return
    rest = iter(words)
    assert all(word in rest for word in left) and len(left) + len(taken) <= len(words)
    assert not {"--enable-chunked-prefill", "--max-log-len"} & set(left)


def test_what_was_probably_meant():
    assert nearest("--max-model-length", KNOWN) == "--max-model-len"
    assert nearest("--tensor-parallel-sizes", KNOWN) == "--tensor-parallel-size"
    assert nearest("--zzz", KNOWN) == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prefix_match_unit", "8"], "--prefix-match-unit 8 is not supported: prefixes are shared by whole blocks; nearest"),
        (["--no-enable-chunked-prefill"], "--no-enable-chunked-prefill is not supported: long prompts are always"),
        (["--enable-chunked-prefill", "false"], "--no-enable-chunked-prefill is not supported"),
        (["--enable_chunked_prefill=False"], "--no-enable-chunked-prefill is not supported"),
        (["--enable-chunked-prefill=x"], "--enable-chunked-prefill is a switch: it takes no x"),
        (["--enable-mm-embeds"], "--enable-mm-embeds is not supported: images come as images"),
        (["-pcp", "2"], "-pcp 2 is not supported"),
        (["--max-model-length", "3"], "did you mean --max-model-len?"),
        (["--max-num", "3"], "unrecognized arguments: --max-num"),  # no abbreviations
        (["--api-key", "k", "org/model"], "--api-key took org/model for one of its values"),
        (["a", "--model", "b"], "the model is a and --model says b"),
        (["--response-role", "a b"], "--response-role is a word"),
        (["--logits-processors", "m:C", "org/model"], "--logits-processors took org/model for one of its values"),
        (["--no-enable-auto-tool-choice"], "nearest: --tool-call-parser none"),
        (["--profiler-config.profiler", "cuda"], "nearest: --profile-dir"),
        (["--profiler-config", '{"torch_profiler_dir": "/t", "torch_profiler_with_stack": true}'], "nearest: --profile-dir"),
    ],
)  # fmt: skip
def test_refusals_are_a_line(words, said, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", "--port", "0", *words])
    err = capsys.readouterr().err
    assert end.value.code == 2 and said in err and err.count("\n") == 1


def test_a_launch_line_of_vllm():
    args = parsed(
        "Qwen/Qwen3-0.6B", "--served-model-name", "a", "b", "--max_model_len", "8K", "--dtype=half", "-tp", "1",
        "--enable-chunked-prefill", "--async-scheduling", "--trust-remote-code", "--gpu-memory-utilization", "0.85",
        "--max-num-seqs", "64", "--disable-log-requests", "--swap-space", "0", "--uvicorn-log-level", "warning", "--api-key",
        "k1", "k2", "--api-key", "k3", "--allowed-origins", '["https://a"]', "--api-server-count", "2", "-O3", "--seed", "7",
        "--hf-overrides.rope_theta", "1e6", "--shutdown-timeout", "5", "--compilation-config", '{"mode": 3}', "--enforce-eager",
    )  # fmt: skip
    assert (args.model, args.served_model_name, args.max_model_len, args.dtype) == (
        "Qwen/Qwen3-0.6B",
        ["a", "b"],
        8192,
        "float16",
    )
    assert args.api_key == ["k1", "k2", "k3"] and args.allowed_origins == ("https://a",) and args.frontends == 2
    assert args.hf_overrides == {"rope_theta": 1e6} and args.log_level == "warning" and args.shutdown_grace_s == 5.0
    assert [note.split()[0] for note in args.notes] == [
        "--enable-chunked-prefill", "--async-scheduling", "--trust-remote-code", "--disable-log-requests", "--swap-space", "-O",
        "--compilation-config",
    ]  # fmt: skip


def test_a_launch_line_with_tools_traces_and_own_code():
    args = parsed(
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser=qwen3", "--otlp-traces-endpoint",
        "http://h:4318", "--logits-processors", "m:A", "n.py:B", "--logits_processors", "m:C", "--logits-processors-path", "p",
        "--profiler-config.profiler", "torch", "--profiler-config.torch_profiler_dir", "/traces",
    )  # fmt: skip
    assert (args.tool_call_parser, args.reasoning_parser) == ("hermes", "qwen3")
    assert args.otlp_traces_endpoint == "http://h:4318" and args.logits_processors_path == ["p"]
    assert args.logits_processors == ["m:A", "n.py:B", "m:C"]
    _take_profiler_config(serve_parser(), args)
    assert args.profile_dir == "/traces" and [note.split()[0] for note in args.notes] == ["--enable-auto-tool-choice"]


@pytest.mark.parametrize(
    ("value", "fine"),
    [('{"backend": "xgrammar"}', True), ('{"backend": "guidance", "disable_fallback": true}', True), ("{}", True),
     ('{"reasoning_parser": "qwen3"}', True), ('{"enable_in_reasoning": true}', False), ('["backend"]', False), ("{", False)],
)  # fmt: skip
def test_members_of_a_json_object_are_looked_at_one_by_one(value, fine):
    assert is_fine(BY_FLAG["--structured-outputs-config"], value) == fine


def test_a_member_of_a_json_object_alone():
    left, taken = take_out(["--structured-outputs-config.backend", "xgrammar", "m"], set())
    assert left == ["m"] and taken == ["--structured-outputs-config (llguidance makes the masks)"]
    with pytest.raises(UnsupportedFlag, match=r"--structured-outputs-config\.backend is not supported"):
        take_out(["--structured-outputs-config.backend=mine"], set())


@pytest.mark.parametrize("topic", ["ModelConfig", "Frontend", "SchedulerConfig", "CacheConfig"])
def test_help_by_vllms_groups(topic, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["serve", f"--help={topic}"])
    assert exit.value.code == 0 and "--" in capsys.readouterr().out


@pytest.mark.parametrize("topic", ["listgroup", "server", "device-and-memory", "max-model-len", "all"])
def test_help_by_topic(topic, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", f"--help={topic}"])
    out = capsys.readouterr().out
    assert end.value.code == 0
    shown = {"listgroup": "batching and scheduling", "server": "--host", "device-and-memory": "-tp", "all": "--curve-key-file"}
    assert shown.get(topic, "--max-model-len") in out
    assert topic == "all" or len(out.splitlines()) < 60


def test_help_about_nothing(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", "--help=nonsense"])
    assert end.value.code == 2 and "listgroup" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("limit_mm_per_prompt", {"image": 1}),
        ("limit_mm_per_prompt", {"image": 0, "video": 0}),
        *(("tokenizer_mode", mode) for mode in ("auto", "hf", "slow", "mistral", "other")),
    ],
)
def test_an_option_in_python_is_taken_where_its_flag_is(name, value):
    flag = ["--" + name.replace("_", "-"), value if isinstance(value, str) else json.dumps(value)]
    taken = []
    for take in (lambda: take_out(flag, ()), lambda: EngineArgs(**{name: value})):
        try:
            take()
            taken.append(True)
        except ValueError as error:
            assert "not supported" in str(error)
            taken.append(False)
    assert taken == [value not in ("other", "pooling")] * 2


def test_variables_of_vllms_that_have_no_effect_are_named():
    environment = {"VLLM_USE_V1": "1", "VLLM_API_KEY": "k", "VLLM_ATTENTION_BACKEND": "x", "HOME": "/"}
    assert unread_variables(environment) == "VLLM_ATTENTION_BACKEND, VLLM_USE_V1"
    assert unread_variables({"VLLM_API_KEY": "k"}) == ""


@pytest.mark.parametrize("name", ["bitsandbytes", "fastsafetensors", "runai_streamer", "safetensors", "hf", "auto"])
def test_load_formats_of_vllms_read_the_checkpoint(name):
    assert parsed("--load-format", name).load_format == "auto"
