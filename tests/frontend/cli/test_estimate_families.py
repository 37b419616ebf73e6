"""`quire estimate` of families that a worker's code counts: weights, KV blocks and ranks' parts as they are built."""

import json

import msgspec
import pytest
import torch
from eagle3_heads import Head
from estimate_cases import QWEN3_06B, folder_of, read
from mtp_heads import mtp_model
from tiny_models import ALL_MODELS, MODELS, tiny_model

from quire.enginecore import daemon
from quire.enginecore.loading.model_files import model_summary
from quire.frontend.cli import main as cli
from quire.frontend.cli.estimate import estimate, gpu_bytes, text_of
from quire.frontend.cli.estimate_items import for_items
from quire.frontend.cli.estimate_model import on_rank
from quire.frontend.cli.estimate_sizes import EstimateError
from quire.frontend.cli.estimate_weights import experts_are_kept, weights_bytes
from quire.ipc.config import EngineConfig
from quire.ipc.speculative_config import SpeculativeConfig
from quire.kernels.step.tables import SamplerWorkspace
from quire.workers.attention.kv_cache import KVCache
from quire.workers.loading.weights import load_weights
from quire.workers.memory import budget_before_loading, cpu_budget, cpu_step_bytes, held_bytes, state_needs
from quire.workers.memory import sizes_of as workers_sizes_of
from quire.workers.models.build import build_model
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel
from quire.workers.recurrent.state_cache import state_cache_of
from quire.workers.speculation.loaded import build_draft_model

OTHERS = [name for name in ALL_MODELS if name not in MODELS]
ALWAYS = ("gemma3-images", "falcon-7b", "bloom", "gptj", "deepseek-v3", "gpt-oss", "qwen2-moe", "nemotron-h", "mamba2")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in ALWAYS else pytest.mark.slow) for n in OTHERS])
def test_a_cpu_engine_of_any_family_counts_the_same(name, asked_here):
    """Weights, those that are packed twice too, KV blocks and the longest sequence to the byte."""
    folder, config = tiny_model(name), EngineConfig(device="cpu", cpu_kv_cache_gib=0.01, language_model_only=True)
    found, worker_config = estimate(read(folder), config, 0), read_model_config(folder)
    worker = daemon.worker_config(config, folder, model_summary(folder)).engine
    cache = KVCache(worker_config.attention_specs(Parallel()), worker.block_size, torch.float32)
    state_bytes = state_cache_of(worker_config, Parallel(), torch.float32).state_bytes
    n = cpu_budget(worker, cache, 0, 0, state_needs(worker, worker_config, state_bytes)).num_blocks
    assert (found.num_blocks, found.kv_cache_bytes) == (n, n * cache.block_bytes)
    rows, tokens = worker.max_num_seqs, max(worker.max_num_batched_tokens, worker.max_num_seqs)
    assert found.activation_bytes == cpu_step_bytes(worker_config, tokens, rows, torch.float32)
    assert found.max_model_len == worker.max_model_len
    loaded = build_model(worker_config, torch.float32, Parallel())
    load_weights(loaded, folder, torch.device("cpu"), progress=False)
    assert found.weights_bytes == loaded.weights_bytes


@pytest.mark.parametrize("name", ["qwen3.5-images", pytest.param("ministral3-images", marks=pytest.mark.slow)])
def test_a_cpu_engine_counts_an_encoder_and_its_cache_too(name, asked_here):
    folder, config = tiny_model(name), EngineConfig(device="cpu", cpu_kv_cache_gib=0.01)
    found, model = estimate(read(folder), config, 0), read(folder)
    cache, *_ = for_items(model, config, found.max_model_len, 4)
    loaded = build_model(read_model_config(folder, sees=True), torch.float32, Parallel())
    load_weights(loaded, folder, torch.device("cpu"), progress=False)
    assert found.weights_bytes == loaded.weights_bytes + cache > loaded.weights_bytes
    assert not model.is_tied


def test_a_gpu_engine_counts_an_encoder_its_cache_and_its_graphs_once(asked_here):
    model, length = read(tiny_model("qwen3.5-images")), 64
    seen, text = (
        estimate(model, EngineConfig(max_model_len=length, language_model_only=only), 80 << 30, "H100")
        for only in (False, True)
    )
    items = model.items
    assert seen.tables_bytes - text.tables_bytes == items.cache_bytes(2 * length, 4)
    assert seen.graphs_bytes - text.graphs_bytes == items.graphs_bytes(2 * length, 4) == items.run_bytes(2 * length, 4)
    assert items.graphs_bytes(10**6, 4) == items.graphs_bytes(4096, 4)


SHARED = [
    (name, size, expert_parallel)
    for name, (size, *ways) in {
        "gpt-oss": (2, False, True), "qwen2-moe": (4, False, True), "deepseek-v3": (2, False, True), "olmo2": (4, False),
        "mixtral-sliding-tied": (2, False, True), "bloom": (2, False), "falcon-11b": (2, False), "gemma3": (2, False),
    }.items()
    for expert_parallel in ways
]  # fmt: skip


@pytest.mark.parametrize(("name", "size", "expert_parallel"), SHARED)
def test_one_of_several_ranks_of_any_family_is_counted_as_it_is_built(name, size, expert_parallel, asked_here):
    folder, ranks = tiny_model(name), Parallel(0, size, expert_parallel=expert_parallel)
    config = EngineConfig(device="cpu", tensor_parallel_size=size, enable_expert_parallel=expert_parallel)
    worker_config = read_model_config(folder)
    model = on_rank(read(folder), size, expert_parallel=expert_parallel)
    built = build_model(worker_config, torch.float32, ranks)
    cache = KVCache(worker_config.attention_specs(ranks), 16, torch.float32)
    assert model.num_parameters == sum(p.numel() for p in built.parameters())
    assert model.sizes == workers_sizes_of(worker_config, ranks)
    assert estimate(read(folder), config, 0).kv_bytes_per_token == cache.block_bytes * len(cache.groups) // 16


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_bfloat16_is_counted_to_a_thousandth(name, asked_here):
    """Routers' corrections stay float32."""
    found = estimate(read(tiny_model(name)), EngineConfig(dtype="bfloat16"), gpu_bytes("H100", None))
    built = build_model(read_model_config(tiny_model(name), sees=True), torch.bfloat16, Parallel(device="meta"))
    assert found.weights_bytes == pytest.approx(built.weights_bytes, rel=1e-3)


def test_a_worker_is_asked_in_a_process_of_its_own(capsys):
    folder = str(tiny_model("qwen3-moe"))
    assert cli.main(["estimate", folder, "--gpu", "L4", "-tp", "2", "--enable-expert-parallel", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    config = read_model_config(folder)
    built = build_model(config, torch.float32, Parallel(0, 2, expert_parallel=True))
    assert found["weights_bytes"] == sum(p.numel() for p in built.parameters()) * 4


def test_what_ranks_cannot_share_is_named(capsys, asked_here):
    folder = str(tiny_model("qwen3-moe"))
    assert cli.main(["estimate", folder, "--gpu", "L4", "-tp", "3"]) == 1
    assert "4 attention heads cannot be split over 3 ranks" in capsys.readouterr().err
    assert cli.main(["estimate", str(tiny_model("llama")), "--gpu", "L4", "-ep"]) == 1
    assert "the model has no experts" in capsys.readouterr().err


def test_other_models_are_counted_by_transformers_path(tmp_path, asked_here):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=64, n_head=4, n_layer=2, n_positions=128, vocab_size=300)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    found = estimate(read(tmp_path), EngineConfig(dtype="float32"), gpu_bytes("L4", None))
    built = build_model(read_model_config(tmp_path), torch.float32, Parallel(device="meta"))
    assert found.weights_bytes == built.weights_bytes and found.max_model_len == 128
    assert found.kv_bytes_per_token == 2 * 2 * 64 * 4


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
TOKEN = {"num_bits": 8, "dynamic": True, "strategy": "token"}


def compressed(weights, inputs=None):
    return {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": weights, "input_activations": inputs}}}


@pytest.mark.parametrize(
    ("config", "is_kept"),
    [
        ({"quant_method": "mxfp4"}, True),
        (FP8, True),
        ({**FP8, "activation_scheme": "static"}, True),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, True),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, False),
        (GPTQ, True),
        ({**GPTQ, "desc_act": True}, False),
        ({**GPTQ, "bits": 8}, False),
        ({**GPTQ, "group_size": 48}, False),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, False),
        (compressed({"num_bits": 4, "group_size": 128}), True),
        (compressed({"num_bits": 4, "group_size": 128, "actorder": "group"}), False),
        (compressed({"num_bits": 8}), False),
        (compressed({"num_bits": 8}, TOKEN), True),
        (compressed({"num_bits": 8}, {**TOKEN, "dynamic": False, "strategy": "tensor"}), True),
    ],
)
def test_experts_of_a_quantized_checkpoint_take_what_their_kernels_hold(config, is_kept):
    assert experts_are_kept(config, has_fp8=True) == is_kept


def test_experts_on_a_gpu_count_as_stored_or_plain(tmp_path, asked_here):
    """By what keeps them: whole ones on several GPUs are dequantized."""
    fields = json.loads((tiny_model("gpt-oss") / "config.json").read_bytes())
    found = read(folder_of(tmp_path, {**fields, "quantization_config": {"quant_method": "mxfp4"}}))
    found = found._replace(stored_bytes=1000, stored_expert_bytes=found.expert_parameters * 17 // 32)
    plain = 2 * found.expert_parameters + 1000
    assert weights_bytes(found, None, 2, has_fp8=True) == found.stored_expert_bytes + 1000
    assert weights_bytes(found, None, 2, has_fp8=True, expert_parallel=True) == plain
    loaded = read(tiny_model("qwen3-moe"))
    experts = loaded.expert_parameters
    of = {name: weights_bytes(loaded, name, 2, has_fp8=True) for name in (None, "fp8", "int4", "int8_per_channel_weight_only")}
    assert of["fp8"] < of[None] - experts and of["int4"] < of["fp8"] - experts * 3 // 8
    assert of["int8_per_channel_weight_only"] - of["fp8"] == experts


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        (GPTQ, 67 / 16),
        ({**GPTQ, "bits": 8}, 8),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128}, 67 / 16),
        (FP8, 8),
        (compressed({"num_bits": 4, "group_size": 128}), 67 / 16),
        (compressed({"num_bits": 8}, TOKEN), 8),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, 16),
    ],
)
def test_without_files_a_quantized_checkpoint_counts_what_its_config_says(quantization, bits, tmp_path, asked_here):
    model = read(folder_of(tmp_path, {**QWEN3_06B, "quantization_config": quantization}))
    kept = model.sizes.vocab_size * model.sizes.hidden_size
    found = estimate(model, EngineConfig(), gpu_bytes("H100", None))
    assert found.weights_bytes == 2 * kept + int((model.num_parameters - kept) * bits / 8)


def test_without_files_experts_count_what_the_config_says(tmp_path, asked_here):
    fields = json.loads((tiny_model("gpt-oss") / "config.json").read_bytes())
    model = read(folder_of(tmp_path, {**fields, "quantization_config": {"quant_method": "mxfp4"}}))
    others = model.num_parameters - model.expert_parameters
    assert weights_bytes(model, None, 2, has_fp8=True) == 2 * others + model.expert_parameters * 17 // 32


@pytest.mark.parametrize(
    ("method", "asked", "said"),
    [
        (None, "gptq", "--quantization gptq: .* has no quantization_config: fp8, .* work"),
        ("gptq", "fp8", r"--quantization fp8: .* is quantized already \(gptq\): leave the flag out"),
        ("fp8", "fp8_per_block", r"is quantized already \(fp8\)"),
        ("hqq", None, "quant_method is 'hqq': supported are gptq"),
        ("auto_round", "auto-round", None),
        (None, "int4", None),
        ("fp8", None, None),
    ],
)
def test_a_quantization_that_an_engine_refuses_is_not_estimated(method, asked, said, asked_here):
    model = read(tiny_model("llama"))
    if method is not None:
        model = model._replace(quantization={"quant_method": method}, stored_bytes=1 << 20)
    if said is None:
        assert estimate(model, EngineConfig(quantization=asked), gpu_bytes("H100", None)).num_blocks
        return
    with pytest.raises(EstimateError, match=said):
        estimate(model, EngineConfig(quantization=asked), gpu_bytes("H100", None))


def test_what_no_worker_can_run_is_not_estimated(tmp_path, asked_here):
    with pytest.raises(EstimateError, match="Mamba"):
        read(folder_of(tmp_path, {**QWEN3_06B, "architectures": ["MambaForCausalLM"]}))


@pytest.mark.parametrize(("target", "draft"), [("llama", "gemma3"), ("deepseek-v3", "llama-tied")])
def test_a_draft_model_is_counted_as_a_worker_counts_it(target, draft, asked_here):
    """Weights and KV blocks to the byte, on one rank and on one of two; every layer of the draft model has its own tensors."""
    folder, asked = tiny_model(target), SpeculativeConfig(method="draft_model", model=str(tiny_model(draft)))
    for size in (1, 2):
        config = EngineConfig(device="cpu", cpu_kv_cache_gib=0.01, tensor_parallel_size=size, speculative_config=asked)
        worker, model = daemon.worker_config(config, folder, model_summary(folder)).engine, read_model_config(folder)
        parallel = Parallel(0, size)
        whole = build_model(model, torch.float32, parallel)
        drafts = build_draft_model(worker, torch.float32, parallel, whole)
        budget = budget_before_loading(worker, model, whole, torch.float32, parallel, drafts)
        cache = KVCache(model.attention_specs(parallel), worker.block_size, torch.float32)
        own = cache.block_bytes
        cache.drafter = drafts.cache
        assert len({place.tensor for place in drafts.cache.places}) == len(drafts.config.layers) and cache.block_bytes > own
        found = estimate(read(folder), config, 0)
        assert (found.num_blocks, found.kv_cache_bytes) == (budget.num_blocks, budget.num_blocks * cache.block_bytes)
        assert found.draft_weights_bytes == held_bytes(drafts.model, torch.float32)
        assert found.activation_bytes == budget.activation_bytes
        plain = estimate(read(folder), msgspec.structs.replace(config, speculative_config=None), 0)
        assert plain.draft_weights_bytes == 0 and plain.weights_bytes == found.weights_bytes
    on_gpu = [estimate(read(folder), EngineConfig(speculative_config=c), 16 << 30, "L4") for c in (None, asked)]
    assert on_gpu[1].kv_cache_bytes < on_gpu[0].kv_cache_bytes - on_gpu[1].draft_weights_bytes + (8 << 20)
    assert "draft model" in text_of(on_gpu[1], read(folder), config) and "draft" not in text_of(on_gpu[0], read(folder), config)


@pytest.mark.parametrize("name", ["deepseek-v3", "nemotron-h"])
def test_mtp_is_counted_as_a_worker_counts_it(name, asked_here):
    folder = mtp_model(name)
    asked = SpeculativeConfig(method="mtp", model=str(folder))
    config = EngineConfig(model=str(folder), device="cpu", cpu_kv_cache_gib=0.01, speculative_config=asked)
    worker, model = daemon.worker_config(config, folder, model_summary(folder)).engine, read_model_config(folder)
    whole = build_model(model, torch.float32, Parallel())
    drafts = build_draft_model(worker, torch.float32, Parallel(), whole)
    budget = budget_before_loading(worker, model, whole, torch.float32, Parallel(), drafts)
    found = estimate(read(folder), config, 0)
    assert found.num_blocks == budget.num_blocks and found.activation_bytes == budget.activation_bytes
    assert found.draft_weights_bytes == held_bytes(drafts.model, torch.float32) + drafts.features.num_bytes
    on_gpu = [
        estimate(read(folder), msgspec.structs.replace(config, device="cuda", speculative_config=c), 16 << 30, "L4")
        for c in (None, asked)
    ]
    assert on_gpu[1].kv_cache_bytes < on_gpu[0].kv_cache_bytes


def test_speculation_keeps_inputs_of_recurrent_layers(asked_here):
    """As many as a worker allocates, on a GPU beside its tables, on a CPU within a step."""
    folder, drafted = tiny_model("qwen3.5"), SpeculativeConfig(method="ngram")
    config, rows = read_model_config(folder), 20
    kept = state_cache_of(config, Parallel(), torch.float32).new_kept(2 * 16 * rows, torch.device("cpu"))
    num_bytes = sum(tensor.nbytes for tensors in kept.values() for tensor in tensors)
    for memory, part in ((16 << 30, "tables_bytes"), (0, "activation_bytes")):
        flags = {"max_num_seqs": rows, "speculative_config": drafted, "dtype": "float32"}
        sizes = read(folder).sizes
        bare = sizes._replace(layers=tuple(layer._replace(kept_elements=0) for layer in sizes.layers))
        model = read(folder)
        found, without = (estimate(model._replace(sizes=some), EngineConfig(**flags), memory) for some in (sizes, bare))
        assert getattr(found, part) - getattr(without, part) == num_bytes > 0
    worker = daemon.worker_config(EngineConfig(device="cpu", **flags), folder, model_summary(folder)).engine
    built = build_model(config, torch.float32, Parallel())
    step = cpu_step_bytes(config, max(worker.max_num_batched_tokens, rows), worker.max_samples, torch.float32)
    assert budget_before_loading(worker, config, built, torch.float32, Parallel()).activation_bytes == step + num_bytes


@pytest.mark.parametrize("speculators", [False, True])
def test_an_eagle3_head_is_counted_by_its_file(speculators, tmp_path, asked_here):
    folder = tiny_model("llama")
    Head(64, 512, draft_vocab=300, taps=(0, 1, 2)).save(tmp_path, speculators=speculators)
    asked = SpeculativeConfig(method="eagle3", model=str(tmp_path))
    config = EngineConfig(device="cpu", cpu_kv_cache_gib=0.01, speculative_config=asked)
    worker, model = daemon.worker_config(config, folder, model_summary(folder)).engine, read_model_config(folder)
    whole = build_model(model, torch.float32, Parallel())
    head = build_draft_model(worker, torch.float32, Parallel(), whole)
    budget = budget_before_loading(worker, model, whole, torch.float32, Parallel(), head)
    found = estimate(read(folder), config, 0)
    assert found.num_blocks == budget.num_blocks
    held = held_bytes(head.model, torch.float32) + head.features.num_bytes
    assert found.draft_weights_bytes == pytest.approx(held, rel=0.1)
    with pytest.raises(EstimateError, match="a local folder is read"):
        estimate(read(folder), EngineConfig(speculative_config=SpeculativeConfig(method="eagle3", model="a/b")), 16 << 30, "L4")


def test_speculation_has_logits_and_a_sampler_for_every_sample(asked_here):
    model, drafted = read(tiny_model("llama")), SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    plain, on = (EngineConfig(max_num_seqs=20, max_num_batched_tokens=512, speculative_config=c) for c in (None, drafted))
    before, after = (estimate(model, config, 16 << 30, "L4") for config in (plain, on))
    vocab, more = model.sizes.vocab_size, 16 * 20 - 20
    assert after.graphs_bytes - before.graphs_bytes == more * vocab * 4
    workspaces = [SamplerWorkspace.allocate(rows, vocab, "meta") for rows in (20, 20 + more)]
    few, many = (sum(x.nbytes for x in vars(space).values()) for space in workspaces)
    masks = more * vocab // 8
    assert after.tables_bytes - before.tables_bytes == pytest.approx(many - few + masks, rel=0.05)
    assert after.activation_bytes == before.activation_bytes and after.kv_cache_bytes < before.kv_cache_bytes
    config = EngineConfig(device="cpu", cpu_kv_cache_gib=0.01, max_num_seqs=20, speculative_config=drafted)
    worker = daemon.worker_config(config, tiny_model("llama"), model_summary(tiny_model("llama"))).engine
    step = cpu_step_bytes(read_model_config(tiny_model("llama")), worker.max_num_batched_tokens, 20 + more, torch.float32)
    assert worker.max_samples == 20 + more and estimate(model, config, 0).activation_bytes == step
