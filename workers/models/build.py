"""ModelConfig -> model: builds one rank's shard with empty parameters on its device."""

import json
import logging

import torch

from quire.ipc.layout import MAX_RANKS
from quire.workers.layers.experts import Experts
from quire.workers.layers.formats.format import WeightFormat, checkpoint_prefix
from quire.workers.layers.linear import Placement
from quire.workers.loading.quantized.schemes import QuantizationError
from quire.workers.models.config import ModelConfig, ModelConfigError
from quire.workers.models.decoder import CausalLM
from quire.workers.models.encoders.table import build_encoder
from quire.workers.models.family_table import FAMILIES
from quire.workers.models.language_model import LanguageModel
from quire.workers.parallel import Parallel

log = logging.getLogger("quire.workers")

GPU_HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256, 512)  # supported by the GPU kernels; a CPU takes any even size


def build_model(config: ModelConfig, dtype: torch.dtype, parallel: Parallel) -> LanguageModel:
    """The rank's shard with uninitialized parameters; fill them with weights.load_weights or weights.dummy_weights.

    Raises ModelConfigError for a head size that the device's kernels do not support, for a number of ranks over which the model
    cannot be split, and for a layer that does not fit its quantization scheme.
    """
    if config.encoder is not None:
        family = FAMILIES.get(config.architecture)  # a decoder's, if its tokens see both ways
        return build_encoder(config, dtype, parallel, None if family is None else family.make_block)
    head_dims = {layer.attention.head_dim for layer in config.layers if layer.attention.is_there and not layer.latent}
    if parallel.device.type == "cuda" and (other := sorted(head_dims.difference(GPU_HEAD_DIMS))):
        sizes = ", ".join(map(str, GPU_HEAD_DIMS))
        raise ModelConfigError(f"head_dim {other[0]} is not supported on a GPU; supported are {sizes}")
    if parallel.device.type == "cuda" and any(layer.attention.cache_dtype == "fp8_e4m3" for layer in config.layers):
        _check_e4m3(parallel.device)
    _check_size(config, parallel)
    if parallel.stage.count > 1:
        _check_pieces(config, parallel)
    place = Placement(dtype, parallel, config.quantization, table_dtype=_table_dtype(config, dtype, parallel))
    try:
        if config.transformers_config is not None:
            from quire.workers.models.transformers.model import TransformersLM  # imports transformers, seconds

            model: LanguageModel = TransformersLM(config, place)
        else:
            model = CausalLM(config, FAMILIES[config.architecture].make_block, place)
    except QuantizationError as error:
        raise ModelConfigError(str(error)) from None
    _say_what_is_dequantized(model, dtype)
    return model


def _table_dtype(config: ModelConfig, dtype: torch.dtype, parallel: Parallel) -> torch.dtype | None:
    """The 16 bits in which a quantized model's embedding and head stay on a CPU, beside float32 activations, if they do."""
    quantized = config.quantization
    if parallel.device.type != "cpu" or dtype != torch.float32 or quantized is None:
        return None
    name = config.dtype if quantized.holds is None else quantized.table_dtype
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(name or "")


def _say_what_is_dequantized(model: LanguageModel, dtype: torch.dtype) -> None:
    """Log why quantized layers of the checkpoint are dequantized, and so cost as much as plain ones: a line per reason."""
    layers: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, WeightFormat | Experts):
            prefix = f"{name}." if isinstance(module, Experts) else checkpoint_prefix(name)
            for layer, why in module.not_computed.items():
                layers.setdefault(why, []).append(f"{prefix}{layer}")
    for why, names in layers.items():
        log.warning(
            "%d layers, from %s to %s, are dequantized to %s, for no kernel computes %s",
            len(names), names[0], names[-1], str(dtype).removeprefix("torch."), why,
        )  # fmt: skip


def _num_added(config: ModelConfig) -> int:
    """The number of layers to which the encoder adds (DeepStack)."""
    assert config.media is not None
    return len(json.loads(config.media.config)["vision_config"].get("deepstack_visual_indexes") or ())


def _check_pieces(config: ModelConfig, parallel: Parallel) -> None:
    """Refuse pipeline stages for models that pass more than hidden states from layer to layer."""
    one = "--pipeline-parallel-size 1"
    if config.transformers_config is not None:
        raise ModelConfigError(f"--model-impl transformers runs a model in one piece: {one}")
    if config.media is not None and parallel.stage.is_first and (deep := _num_added(config)) > len(parallel.stage.layers):
        raise ModelConfigError(f"the encoder adds to the first {deep} layers, which must be in the first stage: {one}")
    if config.model.per_layer is not None or any(layer.attention.shares is not None for layer in config.layers):
        raise ModelConfigError(f"layers that share keys and values, or read inputs of their own, run in one piece: {one}")


def _check_size(config: ModelConfig, parallel: Parallel) -> None:
    """Refuse ranks that cannot split the model. Query heads and MLPs are split evenly; KV heads are split evenly or each is on
    several ranks; under expert parallelism whole experts are distributed."""
    size, expert_parallel = parallel.size, parallel.expert_parallel
    if size > 1 and config.transformers_config is not None:
        raise ModelConfigError("--model-impl transformers runs on one GPU: --tensor-parallel-size 1")
    if expert_parallel and config.transformers_config is None and all(layer.experts is None for layer in config.layers):
        raise ModelConfigError("--enable-expert-parallel: the model has no experts; leave the flag out")
    if fits := _misfit(config, size, expert_parallel):
        do = ", ".join(str(n) for n in range(1, MAX_RANKS + 1) if not _misfit(config, n, expert_parallel))
        or_experts = ", or --enable-expert-parallel, which distributes whole experts"
        or_experts = "" if expert_parallel or _misfit(config, size, True) else or_experts
        raise ModelConfigError(
            f"--tensor-parallel-size {size} does not fit the model: its {fits} cannot be split over {size} ranks; "
            f"{do} would do{or_experts}"
        )


def _misfit(config: ModelConfig, size: int, expert_parallel: bool) -> str | None:
    """The first size of the model that cannot be split over `size` ranks, as text; None if all can."""
    for layer in dict.fromkeys(config.layers):
        heads, kv_heads = layer.attention.num_heads, layer.attention.num_kv_heads
        if heads % size:
            return f"{heads} attention heads"
        if kv_heads % size and size % kv_heads:
            return f"{kv_heads} KV heads"
        if layer.recurrent is not None and (fits := layer.recurrent.misfit(size)):
            return fits
        widths = {"intermediate_size": layer.intermediate_size}
        if (experts := layer.experts) is not None:
            if expert_parallel and experts.routing.num_experts < size:
                return f"{experts.routing.num_experts} experts"
            of_each = 0 if expert_parallel else experts.intermediate_size
            widths = {"moe_intermediate_size": of_each, "shared experts' size": experts.shared_size}
        for name, width in widths.items():
            if width % size:
                return f"{name} {width}"
    return None


def _check_e4m3(device: torch.device) -> None:
    """Refuse GPUs older than Ada: Triton cannot convert e4m3 there."""
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        raise ModelConfigError(
            f"a KV cache of fp8_e4m3 needs a GPU of compute capability 8.9 or newer, this one has {major}.{minor}: "
            "--kv-cache-dtype fp8_e5m2 works"
        )
