"""The families that can be served, by architecture, and the reading of config.json by them.

A family is one file and one line of this table; wrappers.py has the multimodal models around families' text models.
generation_config.json and tokenizer files are read by
`quire.enginecore.loading.model_files`.
"""

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from quire.ipc.quantization import WHILE_LOADING
from quire.ipc.text_config import nested_text
from quire.workers.loading.files import CheckpointLayers
from quire.workers.loading.names import CheckpointNames
from quire.workers.loading.quantized import config_modelopt
from quire.workers.loading.quantized.config import read_quantization
from quire.workers.loading.quantized.config_floats import quantization_while_loading
from quire.workers.loading.quantized.schemes import Quantization, QuantizationError, QuantizationScheme
from quire.workers.loading.weight_loader import WeightsError
from quire.workers.models.cache_dtype import with_cache_dtype
from quire.workers.models.config import ModelConfig, ModelConfigError
from quire.workers.models.decoder import Family
from quire.workers.models.encoders.table import ENCODERS, read_encoder_config
from quire.workers.models.families import (
    bamba,
    bloom,
    cohere,
    deepseek,
    exaone4,
    falcon,
    falcon_h1,
    gemma2,
    gemma3,
    gemma4,
    glm,
    glm4_moe,
    glm4_moe_lite,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    granite_moe_hybrid,
    hy_v3,
    kimi_linear,
    lfm2,
    llama,
    llama4,
    mamba2,
    mimo,
    mimo_v2,
    minimax_m2,
    ministral3,
    mistral,
    mistral4,
    mixtral,
    nemotron_h,
    olmo2,
    olmoe,
    phi,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    qwen3_next,
    seed_oss,
    smollm3,
)
from quire.workers.models.fields import Json, flag, number, read_dtype, read_state_dtype, refuse_unknown, size
from quire.workers.models.refusals import refusal
from quire.workers.models.seeing import seeing
from quire.workers.models.stored_head import tied_as_stored
from quire.workers.models.wrappers import WRAPPED, Wrapper, text_fields, wrapped_names, wrapper_of

log = logging.getLogger("quire.workers")

# by config.json's "architectures"
FAMILIES: dict[str, Family] = {
    "BambaForCausalLM": bamba.FAMILY,
    "BloomForCausalLM": bloom.FAMILY,
    "Cohere2ForCausalLM": cohere.COHERE2,
    "CohereForCausalLM": cohere.COHERE,
    "DeepseekV2ForCausalLM": deepseek.DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": deepseek.DEEPSEEK_V3,
    "Exaone4ForCausalLM": exaone4.FAMILY,
    "FalconForCausalLM": falcon.FAMILY,
    "FalconH1ForCausalLM": falcon_h1.FAMILY,
    "GPTJForCausalLM": gptj.FAMILY,
    "GPTNeoXForCausalLM": gpt_neox.FAMILY,
    "Gemma2ForCausalLM": gemma2.FAMILY,
    "Gemma3ForCausalLM": gemma3.FAMILY,
    "Gemma4ForCausalLM": gemma4.FAMILY,
    "Glm4ForCausalLM": glm.GLM4,
    "Glm4MoeForCausalLM": glm4_moe.FAMILY,
    "Glm4MoeLiteForCausalLM": glm4_moe_lite.FAMILY,
    "GlmForCausalLM": glm.GLM,
    "GptOssForCausalLM": gpt_oss.FAMILY,
    "GraniteForCausalLM": granite.FAMILY,
    "GraniteMoeHybridForCausalLM": granite_moe_hybrid.FAMILY,
    "HYV3ForCausalLM": hy_v3.FAMILY,
    "KimiLinearForCausalLM": kimi_linear.FAMILY,
    "Lfm2ForCausalLM": lfm2.LFM2,
    "Lfm2MoeForCausalLM": lfm2.LFM2_MOE,
    "Llama4ForCausalLM": llama4.FAMILY,
    "LlamaForCausalLM": llama.FAMILY,
    "Mamba2ForCausalLM": mamba2.FAMILY,
    "MiMoForCausalLM": mimo.FAMILY,
    "MiMoV2FlashForCausalLM": mimo_v2.FAMILY,
    "MiMoV2ForCausalLM": mimo_v2.FAMILY,
    "MiniMaxM2ForCausalLM": minimax_m2.FAMILY,
    "Ministral3ForCausalLM": ministral3.FAMILY,
    "Mistral4ForCausalLM": mistral4.FAMILY,
    "MistralForCausalLM": mistral.FAMILY,
    "MixtralForCausalLM": mixtral.FAMILY,
    "NemotronHForCausalLM": nemotron_h.FAMILY,
    "Olmo2ForCausalLM": olmo2.OLMO2,
    "Olmo3ForCausalLM": olmo2.OLMO3,
    "OlmoeForCausalLM": olmoe.FAMILY,
    "Phi3ForCausalLM": phi3.FAMILY,
    "PhiForCausalLM": phi.FAMILY,
    "Qwen2ForCausalLM": qwen2.FAMILY,
    "Qwen2MoeForCausalLM": qwen2_moe.FAMILY,
    "Qwen3ForCausalLM": qwen3.FAMILY,
    "Qwen3MoeForCausalLM": qwen3_moe.FAMILY,
    "Qwen3NextForCausalLM": qwen3_next.QWEN3_NEXT,
    "Qwen3VLMoeTextModel": qwen3_moe.STACKED,
    "Qwen3_5ForCausalLM": qwen3_next.QWEN3_5,
    "Qwen3_5MoeForCausalLM": qwen3_next.QWEN3_5_MOE,
    "SeedOssForCausalLM": seed_oss.FAMILY,
    "SmolLM3ForCausalLM": smollm3.FAMILY,
}

BESIDE = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")  # AutoGPTQ's, AutoAWQ's first, ModelOpt's


def read_model_config(
    model_dir: str | Path, overrides: Json | None = None, choose: Callable[[Json], Json] | None = None, **options: Any
) -> ModelConfig:
    """ModelConfig of the folder's config.json, with `overrides` replacing fields. options: those of parse_model_config. choose:
    changes the fields before a family reads them.

    Raises ModelConfigError for a model that cannot be served.
    """
    path = Path(model_dir) / "config.json"
    try:
        fields = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelConfigError(f"{path} does not exist") from None
    except (ValueError, RecursionError) as error:
        raise ModelConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ModelConfigError(f"{path} is not a JSON object")
    beside = None
    if quantization_config_of(fields) is None:
        beside = next((file for name in BESIDE if (file := Path(model_dir) / name).exists()), None)
    if beside is not None:
        fields["quantization_config"] = _beside(beside)
    own = quantization_config_of(fields)
    fields = tied_as_stored(_overridden(fields, overrides or {}), Path(model_dir))
    fields = fields if choose is None else choose(fields)
    config = parse_model_config(fields, quantization_file=(beside or path).name, **options)
    if config.quantization is None or own is None or quantization_config_of(fields) is not own:
        return config  # a flag counts for all layers, whatever the files hold
    return msgspec.structs.replace(config, quantization=as_stored(config.quantization, Path(model_dir), config.names))


def _overridden(fields: Json, overrides: Json) -> Json:
    """The fields with `overrides`; an override of null also removes the field from text_config."""
    found, text = {**fields, **overrides}, nested_text(fields)
    if text is not None and nested_text(overrides) is None:
        found["text_config"] = {name: v for name, v in text.items() if name not in overrides or overrides[name] is not None}
    return found


def as_stored(quantized: Quantization, model_dir: Path, names: CheckpointNames) -> Quantization:
    """Treat layers stored as floats as not quantized, whatever quantization_config says: it often fails to list them all."""
    try:
        stored = CheckpointLayers(model_dir, names)
    except (WeightsError, OSError):
        return quantized  # without files, or with bad ones: loading reports them
    if stored.are_all_plain and quantized.kv_cache_dtype is None and not names.only:
        log.warning("quantization_config says %s, but all tensors are floats: they are taken as they are", quantized.method)

    def scheme_of(*layer: str) -> QuantizationScheme | None:
        return None if any(map(stored.is_plain, layer)) else quantized.scheme_of(*layer)

    return quantized._replace(scheme_of=scheme_of, holds=stored.holds, table_dtype=stored.table_dtype)


def _beside(path: Path) -> Json:
    """The quantization config in a file of its own, of old checkpoints. AutoAWQ's file has the method, others lack it."""
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelConfigError(f"{path} is not a JSON object")
    if path.name == BESIDE[2]:
        return config_modelopt.beside(config)
    method = "awq" if "zero_point" in config or "w_bit" in config else "gptq"
    return {"quant_method": method, **config}


def parse_model_config(
    fields: Json,
    *,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    kv_cache_dtype_skip_layers: Sequence[str] = (),
    model_impl: str = "auto",
    sees: bool = False,
    quantization_file: str = "config.json",
) -> ModelConfig:
    """ModelConfig from config.json's fields, and from the flags of these names.

    sees: whether the model takes items beside text, if it can. quantization_file: where quantization_config was found, for
    errors. Raises ModelConfigError, naming the unsupported field.
    """
    quantized = _quantization(quantization_config_of(fields), quantization, quantization_file)
    config = _by_impl(fields, quantized, model_impl)
    if sees:
        config = seeing(fields, config)
    layers = with_cache_dtype(config.layers, kv_cache_dtype, kv_cache_dtype_skip_layers, quantized)
    return msgspec.structs.replace(config, layers=layers)


def _by_impl(fields: Json, quantized: Quantization | None, model_impl: str) -> ModelConfig:
    """Read the fields by a family's file, or for transformers' own model: `auto` does so for models without a family.

    A model that its family refuses is refused: transformers would ignore a field that it does not know.
    """
    reason, architectures = "", _architectures(fields)
    if model_impl != "transformers" and architectures and str(architectures[0]) in ENCODERS:
        config = read_encoder_config(fields, str(architectures[0]), quantized)
        by_names = None if quantized is None else _by_all_names(quantized, config.names)
        return msgspec.structs.replace(config, quantization=by_names)
    if architectures and not _is_known(fields) and (why := refusal(fields, architectures[0])):
        raise ModelConfigError(f"architecture {architectures[0]!s:.80} is not supported: {why}")
    if model_impl != "transformers":
        try:
            architecture, wrapper = _architecture(fields)
        except ModelConfigError as error:
            if not architectures:
                raise
            if model_impl == "quire":
                raise ModelConfigError(f"--model-impl quire: {error}; auto tries transformers' own model") from None
            reason = str(error)
        else:
            return _of_family(fields, architecture, wrapper, quantized)
    first = f"{reason}. transformers' own model cannot be run either" if reason else "--model-impl transformers"
    try:
        from quire.workers.models.transformers.read import read_transformers_config  # imports transformers: seconds
    except ImportError as error:
        raise ModelConfigError(f"{first}: the transformers that is installed is too old for it ({error})") from None
    try:
        return read_transformers_config(fields, quantized)
    except ModelConfigError as error:
        raise ModelConfigError(f"{first}: {error}") from None


def _of_family(fields: Json, architecture: str, wrapper: Wrapper | None, quantized: Quantization | None) -> ModelConfig:
    family = FAMILIES[architecture]
    names = family.names
    if wrapper is not None:
        fields, names = text_fields(fields, wrapper, family.fields), wrapped_names(names, wrapper)
    given, fields = fields, family.plain_fields(fields)
    if quantized is not None:
        quantized = _by_all_names(quantized, names)
    refuse_unknown(fields, family.name, family.fields, family.activations, given)
    layers = family.read_layers(fields)
    return ModelConfig(
        architecture=architecture,
        vocab_size=size(fields, "vocab_size"),
        hidden_size=size(fields, "hidden_size"),
        layers=layers,
        model=family.read_model(fields),
        names=names._replace(ignored=(*names.ignored, *family.ignored(fields))),
        tie_word_embeddings=flag(fields, "tie_word_embeddings"),
        max_position_embeddings=size(fields, "max_position_embeddings"),
        initializer_range=number(fields, "initializer_range", 0.02),
        dtype=read_dtype(fields),
        quantization=quantized,
        state_dtype=read_state_dtype(fields),
        mtp=family.read_mtp(fields, layers),
    )


def _by_all_names(quantized: Quantization, names: CheckpointNames) -> Quantization:
    """Rules may use a layer's name in the model or any of its names in checkpoints."""

    def scheme_of(*layer: str) -> QuantizationScheme | None:
        return quantized.scheme_of(*(spelled for name in layer for spelled in names.in_checkpoint(name)))

    return quantized._replace(scheme_of=scheme_of)


def quantization_config_of(fields: Json) -> object:
    """The quantization config, also under compressed-tensors' old name compression_config, and in a multimodal text_config."""
    text = nested_text(fields)
    places = (fields,) if text is None else (fields, text)
    found = (place.get(name) for place in places for name in ("quantization_config", "compression_config"))
    return next((config for config in found if config is not None), None)


def _quantization(config: object, asked: str | None, file: str) -> Quantization | None:
    """The quantization of the checkpoint by this file; without one, that which --quantization asks for."""
    if config is None:
        if asked is not None and asked not in WHILE_LOADING:
            names = ", ".join(WHILE_LOADING)
            raise ModelConfigError(
                f"--quantization {asked}: the checkpoint has no quantization_config; its weights can be quantized while they "
                f"are loaded, to {names}"
            )
        return None if asked is None else quantization_while_loading(asked)
    try:
        found = read_quantization(config)
    except QuantizationError as error:
        raise ModelConfigError(f"{file}: {error}") from None
    if asked not in (None, found.method):
        raise ModelConfigError(
            f"--quantization {asked}: the checkpoint is quantized already, its quantization_config says {found.method}: "
            "leave the flag out"
        )
    return found


def _architectures(fields: Json) -> list[object]:
    names = fields.get("architectures")
    return names if isinstance(names, list) else []


def _is_known(fields: Json) -> bool:
    """Whether an architecture is in one of our tables."""
    return any(name in FAMILIES or name in WRAPPED for name in _architectures(fields) if isinstance(name, str))


def _architecture(fields: Json) -> tuple[str, Wrapper | None]:
    """The key of FAMILIES for the text model, and the wrapper around it, if there is one."""
    names = _architectures(fields)
    if not names:
        raise ModelConfigError('config.json lacks "architectures", which names the model class')
    for name in names:
        if isinstance(name, str) and (wrapper := wrapper_of(fields, name)) is not None:
            return wrapper.text, wrapper
        if isinstance(name, str) and name in FAMILIES:
            return name, None
    raise ModelConfigError(f"architecture {names[0]!s:.80} is not supported: no family of Quire's own has it (docs/models.md)")
