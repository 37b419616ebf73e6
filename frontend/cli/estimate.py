"""`quire estimate MODEL`: how the memory of a GPU or CPU would be divided, without a GPU: weights, a step, KV cache, requests.

The formulas are the worker's (ipc/memory_plan.py) and the flags those of `quire serve`, so that a launch line can be tried.
Sizes that a worker measures are estimated: within one percent of the KV cache of an 8B and a 0.6B model on an H100.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from typing import NamedTuple

import msgspec

from quire.frontend.cli.estimate_cpu import cpu_packed_bytes, weights_on_cpu
from quire.frontend.cli.estimate_draft import draft_sizes
from quire.frontend.cli.estimate_encoder import computes_whole_texts, draws_tokens, step_tokens, texts_at_once
from quire.frontend.cli.estimate_items import as_served, for_items
from quire.frontend.cli.estimate_model import ITEMSIZE, Model, read_model
from quire.frontend.cli.estimate_sizes import EstimateError, adapters_bytes
from quire.frontend.cli.estimate_stage import share_of
from quire.frontend.cli.estimate_weights import WITHOUT_FP8, check_quantization, weights_bytes
from quire.ipc import memory_plan as plan
from quire.ipc.bundled import bundled
from quire.ipc.config import EngineConfig, add_engine_arguments, engine_config_from
from quire.ipc.cpu_memory import CpuNeeds, available, default_kv_bytes, refusal, room_for_kv
from quire.ipc.memory_plan import GIB
from quire.ipc.process.command import CommandParser
from quire.ipc.quantization import WHILE_LOADING
from quire.ipc.step.sections import max_samples_of

# GiB that the driver offers, which is less than the name says
GPUS = {
    "H100": 79.18, "H200": 139.8, "H100-NVL": 93.1, "A100": 79.25, "A100-40GB": 39.49, "L40S": 44.39, "L40": 44.39, "L4": 22.03,
    "A10": 22.06, "A10G": 22.06, "A6000": 47.43, "RTX-6000-ADA": 47.43, "RTX-4090": 23.54, "RTX-3090": 23.57, "RTX-5090": 31.36,
    "B200": 178.35, "H20": 95.58, "GH200": 94.5, "GB10": 119.7, "L20": 44.53, "A40": 44.43, "RTX-3060": 11.63, "RTX-3080": 9.64,
    "RTX-4060": 7.62, "RTX-4070": 11.59, "RTX-4080": 15.59, "RTX-5070": 11.5, "RTX-5080": 15.47,
}  # fmt: skip
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


class _GpuName(str):
    """A string; `names` is for shell completion."""

    names = tuple(GPUS)


class Estimate(NamedTuple):
    """Sizes in bytes, unless a field's name says otherwise. total_bytes: on a CPU what is available, 0 if that is not known."""

    model: str
    device: str
    dtype: str
    total_bytes: int
    weights_bytes: int
    activation_bytes: int
    graphs_bytes: int
    tables_bytes: int
    kv_cache_bytes: int
    kv_bytes_per_token: int
    num_blocks: int
    block_size: int
    tokens: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_states: int = 0  # recurrent states, with the dummy
    states_bytes: int = 0
    draft_weights_bytes: int = 0  # of a draft model
    adapters_bytes: int = 0  # of all adapter slots
    is_encoder: bool = False
    refusal: str | None = None  # why a start on this CPU would be refused

    @property
    def requests(self) -> float:
        """How many requests of max_model_len tokens fit at once; of an encoder, into a step."""
        return (self.tokens or self.max_num_batched_tokens * self.is_encoder) / self.max_model_len


def add_estimate(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    parser = commands.add_parser(
        "estimate",
        help="compute how a model would fit into a GPU's memory, or this machine's",
        usage="quire estimate [MODEL] [--gpu NAME | --gpu-memory SIZE | --device cpu] [FLAGS]",
        description="Computes how memory would be divided, from config.json and the weights' headers. Flags: as quire serve's.",
        epilog="example: quire estimate Qwen/Qwen3-0.6B --gpu L4 --max-model-len 8k",
    )
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--gpu",
        type=_GpuName,
        metavar="NAME",
        help=f"one of {', '.join(GPUS)} (default: the GPU of this machine, or else its CPU)",
    )
    machine.add_argument(
        "--gpu-memory", type=_bytes, metavar="SIZE", help="a GPU's memory, like 24GiB or 24GB (default: --gpu's)"
    )
    machine.add_argument(
        "--frontends",
        "--api-server-count",
        "-asc",
        type=int,
        default=1,
        metavar="N",
        help="HTTP processes, whose memory counts on a CPU (default: 1)",
    )
    machine.add_argument("--json", action="store_true", help="print all numbers as one JSON object")
    add_engine_arguments(parser)
    parser.set_defaults(run=_estimate, parser=parser)


def _estimate(args: argparse.Namespace) -> int:
    parser: CommandParser = args.parser
    try:
        name, memory = machine_of(args)
        config = engine_config_from(args)
    except ValueError as error:
        parser.error(str(error))
    try:
        model = read_model(
            args.model or str(bundled(config.runner).folder),
            config.revision,
            config.download_dir,
            config.hf_token,
            config.hf_overrides,
        )
        there = None if memory else available()
        if there is not None:
            config = msgspec.structs.replace(config, host_memory_limit=there.limit)
        found = estimate(model, config, memory, name, None if there is None else there.num_bytes)
        if args.model is None:
            found = found._replace(model=bundled(config.runner).name)
    except EstimateError as error:
        print(f"quire estimate: {error}", file=sys.stderr)
        return 1
    print(json.dumps({**found._asdict(), "requests": round(found.requests, 3)}) if args.json else text_of(found, model, config))
    return 0 if found.num_blocks >= plan.least_blocks(found.kv_bytes_per_token) and found.refusal is None else 1


def machine_of(args: argparse.Namespace) -> tuple[str, int]:
    """The GPU's name and memory; "" and 0 for a CPU. Without a flag it is this machine's. Raises ValueError."""
    if args.device == "cpu":
        return "", 0
    if args.gpu is None and args.gpu_memory is None:
        found = own_gpu()
        if found is None and args.device == "cuda":
            raise ValueError(f"--device cuda: there is no GPU here; --gpu takes {', '.join(GPUS)}")
        return found or ("", 0)
    return args.gpu or "", gpu_bytes(args.gpu or "", args.gpu_memory)


def own_gpu() -> tuple[str, int] | None:
    """The name and memory of this machine's first GPU, by nvidia-smi; None if there is none."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return None
    name, _, mib = lines[0].rpartition(",") if lines else ("", "", "")
    return (name.strip(), int(mib) << 20) if mib.strip().isdecimal() else None


def gpu_bytes(name: str, memory: int | None) -> int:
    """The GPU's memory. Raises ValueError for a GPU that is not in the list."""
    if memory is not None:
        return memory
    gib = _gib_of(name)
    if gib is None:
        raise ValueError(f"--gpu {name}: known are {', '.join(GPUS)}; --gpu-memory takes any size")
    return int(gib * GIB)


def _gib_of(gpu: str) -> float | None:
    """The memory of a GPU by any spelling of its name: `A100-80GB`, `RTX 4090` and `nvidia-l4` are found, too."""
    words, found = _plain(gpu), None
    for name, gib in GPUS.items():
        rest = words.removeprefix(_plain(name)) if words.startswith(_plain(name)) else "no"
        size = rest.removesuffix("gb")
        if not rest:
            return gib
        if rest.endswith("gb") and size.isdecimal() and abs(int(size) - gib) < 0.1 * gib:
            found = gib
    return found


def _plain(gpu: str) -> str:
    return re.sub(r"[\s_-]|nvidia|geforce|sxm\d?|pcie|hbm\d?e?", "", gpu.lower())


def _bytes(text: str) -> int:
    parts = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)\s*([kmgt]?i?)b?", text.lower())
    size = int(float(parts[1]) * _UNITS[parts[2]]) if parts and parts[2] in _UNITS else 0
    if size < 1 << 30:
        raise argparse.ArgumentTypeError(f"{text!r} is no size of a GPU's memory, like 24GiB or 24GB")
    return size


# ----------------------------------------------------------------------------------------------------------- the plan
def estimate(model: Model, config: EngineConfig, memory: int, gpu: str = "", available: int | None = None) -> Estimate:
    """memory: the GPU's bytes; 0 for a CPU. available: bytes for an engine on a CPU, if known. Raises EstimateError."""
    check_quantization(model, config.quantization)
    model = as_served(on_one(model._replace(sizes=with_cache_dtype(model, config)), config), config)
    is_gpu, sizes = memory > 0, model.sizes
    dtype, length = _dtype_and_length(model, config, is_gpu=is_gpu)
    cache_bytes, run, item_graphs = for_items(model, config, length, item := ITEMSIZE[dtype])
    states = states_of(sizes, config, item)
    rows = config.max_num_seqs or plan.default_max_num_seqs(memory, states > 0)
    samples, kept = _samples_and_kept(sizes, config, rows, item)
    tokens, length = step_tokens(model, config, length, is_gpu=is_gpu)
    block_size, slots = config.block_size or plan.default_block_size(is_gpu), adapters_bytes(model.config, config, dtype)
    has_fp8 = not _plain(gpu).startswith(WITHOUT_FP8)
    weights = _gpu_weights(model, config, item, has_fp8=has_fp8) if is_gpu else model.num_parameters * item
    draft = draft_sizes(config, dtype, max(tokens, rows), rows, block_size, sizes.hidden_size, is_gpu=is_gpu, has_fp8=has_fp8)
    block, groups = plan.kv_block_bytes(sizes, block_size, item) + draft.block, len(plan.kv_groups(sizes))
    if is_gpu:
        step = max(plan.gpu_step_bytes(sizes, max(tokens, rows), item), draft.step)
        logits, captured = samples * sizes.vocab_size * item, plan.captured_tokens(weights, tokens)
        own = item_graphs + plan.graphs_bytes(captured, tokens, step, logits)
        step, draws, graphs = max(step, run), draws_tokens(model, config), plan.GRAPHS_BYTES + own * (not config.enforce_eager)
        tables = cache_bytes + plan.exchange_bytes(sizes, config.tensor_parallel_size, item) + kept
        tables += plan.tables_bytes(sizes, rows, length, tokens, block_size, samples, draws=draws)
        room = int(config.gpu_memory_utilization * memory) - weights - slots - draft.weights - step - graphs - tables
        num_states, room = divided(room, block, states, config, rows)
        blocks = max(plan.blocks_in(room, block), 0) if room >= 0 else 0
    else:
        weights = weights_on_cpu(model, config, dtype, weights + cpu_packed_bytes(model, item)) + cache_bytes
        step, graphs, tables = max(plan.cpu_step_bytes(sizes, max(tokens, rows), samples, item) + kept, draft.step, run), 0, 0
        is_packed = model.quantization is not None or config.quantization is not None
        copies, most = (config.world_size, config.data_parallel_size), plan.most_useful_blocks(groups, rows, length, block_size)
        needs = CpuNeeds(weights + slots + draft.weights, step, *copies, item, is_packed, config.frontends, sizes.vocab_size)
        num_states, room = divided(_cpu_cache(config, needs, available), block, states, config, rows)
        least = plan.least_blocks(block) if config.cpu_kv_cache_gib is None else 0
        blocks = min(max(plan.blocks_in(room, block), least), most)
    blocks, num_states = _as_asked(config, block, states, rows) or (blocks, num_states)
    return Estimate(
        model=model.name,
        device=(gpu or "GPU") if is_gpu else "CPU",
        dtype=dtype,
        total_bytes=memory or available or 0,
        weights_bytes=weights,
        activation_bytes=step,
        graphs_bytes=graphs,
        tables_bytes=tables,
        kv_cache_bytes=blocks * block,
        kv_bytes_per_token=block * groups // block_size,
        num_blocks=blocks,
        block_size=block_size,
        tokens=plan.cached_tokens(blocks, block_size, groups),
        max_model_len=length,
        max_num_seqs=rows,
        max_num_batched_tokens=tokens,
        refusal=None if is_gpu else _refusal(config, available, needs, blocks * block + num_states * states),
        is_encoder=computes_whole_texts(model),
        num_states=num_states,
        states_bytes=num_states * states,
        draft_weights_bytes=draft.weights,
        adapters_bytes=slots,
    )


def _gpu_weights(model: Model, config: EngineConfig, item: int, *, has_fp8: bool) -> int:
    whole = config.enable_expert_parallel
    return weights_bytes(model, config.quantization, item, has_fp8=has_fp8, expert_parallel=whole)


def _samples_and_kept(sizes: plan.ModelSizes, config: EngineConfig, rows: int, item: int) -> tuple[int, int]:
    """The most samples of a step, and bytes of what recurrent layers keep of its drafts."""
    if config.speculative_config is None:
        return rows, 0
    samples = max_samples_of(rows)
    return samples, plan.kept_bytes(sizes, samples, item)


def _refusal(config: EngineConfig, available: int | None, needs: CpuNeeds, cache_bytes: int) -> str | None:
    return None if available is None else refusal(available, needs, cache_bytes, config.host_memory_limit)


def _dtype_and_length(model: Model, config: EngineConfig, *, is_gpu: bool) -> tuple[str, int]:
    dtype = config.dtype if config.dtype != "auto" else (model.dtype or "bfloat16") if is_gpu else "float32"
    if dtype not in ITEMSIZE:
        raise EstimateError(f"{model.name}: dtype {dtype} is not supported")
    length = config.max_model_len or model.max_model_len
    if length > model.max_model_len:
        raise EstimateError(f"--max-model-len {length} is more than the model was made for ({model.max_model_len})")
    return dtype, length


def _cpu_cache(config: EngineConfig, needs: CpuNeeds, available: int | None) -> int:
    """Bytes of KV blocks and recurrent states, as workers/memory.py decides."""
    if config.cpu_kv_cache_gib is not None:
        return int(config.cpu_kv_cache_gib * GIB)
    room = None if available is None else room_for_kv(available, needs)
    return default_kv_bytes(room, needs.ranks * needs.engines)


def _as_asked(config: EngineConfig, block: int, states: int, rows: int) -> tuple[int, int] | None:
    """KV blocks and recurrent states that flags ask for, whatever memory there is; None without such flags."""
    asked = config.requested_blocks(1)  # in blocks of a byte
    if asked is None:
        return None
    num_states, _ = divided(asked if config.num_gpu_blocks_override is None else 0, block, states, config, rows)
    return config.requested_blocks(block, num_states * states) or 0, num_states


def states_of(sizes: plan.ModelSizes, config: EngineConfig, item: int) -> int:
    """Bytes of a recurrent state; 0 if the model has none."""
    asked = config.mamba_ssm_cache_dtype
    return plan.state_bytes(sizes, item, ITEMSIZE[sizes.state_dtype if asked == "auto" else asked])


def divided(room: int, block: int, states: int, config: EngineConfig, rows: int) -> tuple[int, int]:
    """The number of states of so many bytes, and the bytes that they leave of `room`, as workers/memory.py decides."""
    if not states:
        return 0, room
    useful = plan.useful_states(rows, config.enable_prefix_caching)
    count = config.num_states or plan.states_in(max(room, 0), block, states, useful)
    return count, room - count * states


def on_one(model: Model, config: EngineConfig) -> Model:
    """The share of the model that one GPU holds. Raises EstimateError."""
    ranks, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    return share_of(model, ranks, stages, expert_parallel=config.enable_expert_parallel)


def with_cache_dtype(model: Model, config: EngineConfig) -> plan.ModelSizes:
    """The model's sizes with the layers' --kv-cache-dtype, chosen and refused as in workers/models/cache_dtype.py.

    Raises EstimateError.
    """
    skipped, count = config.kv_cache_dtype_skip_layers, len(model.sizes.layers)
    if absent := [name for name in skipped if name.isdecimal() and int(name) >= count]:
        raise EstimateError(f"--kv-cache-dtype-skip-layers {absent[0]}: {model.name} has layers 0 to {count - 1}")
    if config.kv_cache_dtype == "auto" and not model.has_kv_cache_scheme:
        if skipped:
            raise EstimateError("--kv-cache-dtype-skip-layers: no layer's cache has 8 bits without --kv-cache-dtype fp8")
        return model.sizes
    if any(not layer.has_values for layer in model.sizes.layers):
        raise EstimateError(f"{model.name}: of latent attention the cache has the model's dtype: --kv-cache-dtype auto works")

    def itemsize(index: int, layer: plan.LayerSizes) -> int:
        return 0 if str(index) in skipped or (layer.window and "sliding_window" in skipped) else 1

    layers = tuple(layer._replace(cache_itemsize=itemsize(i, layer)) for i, layer in enumerate(model.sizes.layers))
    return model.sizes._replace(layers=layers)


def text_of(found: Estimate, model: Model, config: EngineConfig) -> str:
    ranks, model = config.world_size, as_served(on_one(model, config), config)
    each = f", each of {ranks}" if ranks > 1 else ""
    counted = "" if model.is_counted else ", computed from config.json"
    if found.device != "CPU" and (model.stored_bytes or config.quantization in WHILE_LOADING):
        counted += ", quantized"
    size = f" ({found.total_bytes / GIB:.1f} GiB)" if found.total_bytes else ""
    rows = [
        ("weights", found.weights_bytes, f"{model.num_parameters:,} parameters{counted}"),
        ("draft model", found.draft_weights_bytes, "its weights; a token in the KV cache is both models'"),
        (
            "adapters",
            found.adapters_bytes,
            f"{config.max_loras} slots of {found.adapters_bytes / config.max_loras / 1e6:,.1f} MB",
        ),
        ("activations", found.activation_bytes, f"of a step of {found.max_num_batched_tokens:,} tokens"),
        ("graphs", found.graphs_bytes, "captured steps" if not config.enforce_eager else "a reserve"),
        ("tables", found.tables_bytes, f"of {found.max_num_seqs:,} sequences at once, and CUDA's context"),
        ("states", found.states_bytes, f"{found.num_states:,} recurrent states"),
        ("KV cache", found.kv_cache_bytes, f"{found.tokens:,} tokens of {found.kv_bytes_per_token:,} bytes"),
    ]
    lines = [f"{found.model} on {found.device}{size}{each}, {found.dtype}"]
    has_cache = not computes_whole_texts(model)
    shown = [row for row in rows if row[1] or (row[0] == "KV cache" and has_cache)]
    lines += [f"  {name:<12} {value / GIB:>8.2f} GiB  {text}" for name, value, text in shown]
    if found.refusal is not None:
        return "\n".join([*lines, f"It does not fit: {found.refusal}."])
    if computes_whole_texts(model):
        return "\n".join([*lines, texts_at_once(found.max_num_batched_tokens, found.max_model_len)])
    if not found.kv_bytes_per_token and found.num_blocks:  # a model without attention
        running = min(max(found.num_states - 1, 0), found.max_num_seqs)  # less the dummy
        return "\n".join([*lines, f"{running:,} requests fit at once, of any length."])
    if found.num_blocks < 2:
        needed = sum(value for _, value, _ in rows) / config.gpu_memory_utilization / GIB
        return "\n".join([*lines, f"It does not fit: {needed:.1f} GiB of memory are needed before any KV cache."])
    if found.tokens < found.max_model_len:
        lines.append(f"No request may be longer than {found.tokens:,} tokens: not one of {found.max_model_len:,} fits.")
    elif found.requests > found.max_num_seqs:
        lines.append(
            f"All {found.max_num_seqs:,} requests of --max-num-seqs fit at once, with {found.max_model_len:,} tokens each."
        )
    else:
        lines.append(f"{found.requests:.1f} requests of {found.max_model_len:,} tokens fit at once.")
    return "\n".join(lines)
