"""A model's sizes for an estimate, from config.json and the headers of its safetensors files: no weights are read.

The model is a local folder or a hub repository, of which a few kilobytes are fetched. Only a worker knows whether the model can
be served (workers/models/). The plainest families are counted here, with windows and head sizes read as a worker reads them,
which a test checks. All others are counted by the worker's own code (estimate_sizes.py).
"""

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from quire.frontend.cli.estimate_sizes import EstimateError, Json, sizes_on_rank
from quire.ipc.hub_names import hub_id_of
from quire.ipc.memory_plan import ItemSizes, LayerSizes, ModelSizes
from quire.ipc.quantization import OTHER_NAMES
from quire.ipc.text_config import checked_context, is_stretched, text_fields
from quire.ipc.weights_file import weights_file

_MAX_HEADER_BYTES = 100 << 20
_MAX_LAYERS = 10_000  # as of a worker (workers/models/fields.py)
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}

# Architectures counted here, with their number of KV heads if config.json has none; None: as many as query heads
BY_HAND = {"LlamaForCausalLM": None, "MistralForCausalLM": 8, "Qwen2ForCausalLM": 32, "Qwen3ForCausalLM": 32}


class Model(NamedTuple):
    name: str
    sizes: ModelSizes
    max_model_len: int
    dtype: str | None  # as in config.json
    num_parameters: int
    is_tied: bool  # the head is the embedding
    is_counted: bool  # from the files' headers; otherwise computed from config.json
    has_kv_cache_scheme: bool = False  # the checkpoint was made for an 8-bit KV cache
    stored_bytes: int = 0  # a quantized checkpoint's tensors, without experts
    quantization: Json | None = None  # its quantization_config; {} if that is in another file
    asked: Json | None = None  # its config, if a worker's code counts a rank's weights
    expert_parameters: int = 0  # included in num_parameters
    packed_elements: list[int] | None = None  # as in RankSizes
    stored_expert_bytes: int = 0  # a quantized checkpoint's experts
    stored_floats: int = 0  # elements of its weights that are floats, with
    stored_item: int = 0  # bytes each
    folder: str | None = None  # of the files, if they are here
    config: Json | None = None  # config.json with overrides
    items: ItemSizes | None = None  # as in RankSizes


class Tensor(NamedTuple):
    """A tensor of a safetensors file."""

    name: str
    num_elements: int
    num_bytes: int


def read_model(name: str, revision: str | None, download_dir: str | None, token: str | None, overrides: Json) -> Model:
    """Read a folder or hub repository. Raises EstimateError."""
    folder, here = Path(name).expanduser(), None
    if folder.is_dir():
        config, tensors = _with_modelopt(_json(folder / "config.json"), folder), list(_local_tensors(folder))
        here = str(folder)
    elif folder.exists():
        raise EstimateError(f"{name} is a file; give the model's folder")
    else:
        try:
            config, tensors, here = _of_hub(hub_id_of(name), revision, download_dir, token)
        except ValueError as error:  # also EstimateError
            raise EstimateError(str(error)) from None
    config = {**config, **overrides}
    model = _asked(name, config, tensors) if not _is_plain(config) else _by_hand(name, config, tensors)
    return model._replace(folder=here, config=config)


def _by_hand(name: str, config: Json, tensors: list[Tensor]) -> Model:
    sizes = sizes_of(config)
    tied = bool(config.get("tie_word_embeddings"))
    tensors = [tensor for tensor in tensors if not (tied and tensor.name == "lm_head.weight")]
    counted, stored = sum(tensor.num_elements for tensor in tensors), 0
    quantization = config.get("quantization_config") or config.get("compression_config")
    found: Json | None = None
    if quantization or any(tensor.name.endswith(".qweight") for tensor in tensors):  # old GPTQ and AWQ have another config file
        counted, stored = 0, sum(tensor.num_bytes for tensor in tensors)  # elements are packed
        found = quantization if isinstance(quantization, dict) else {}
    scheme = found is not None and has_kv_cache_scheme(found)
    parameters = counted or computed_parameters(sizes, tied)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.") or None
    length = _max_model_len(config)
    model = Model(name, sizes, length, dtype, parameters, tied, bool(counted), scheme, stored, found)
    return _with_floats(model, tensors)


def _with_floats(model: Model, tensors: list[Tensor]) -> Model:
    """Count a quantized checkpoint's float weights; of several item sizes, only that of the largest tensor, the embedding."""
    floats = [t for t in tensors if t.name.endswith(".weight") and t.num_bytes >= 2 * t.num_elements > 0]
    if model.quantization is None or not floats:
        return model
    largest = max(floats, key=lambda t: t.num_elements)
    item = largest.num_bytes // largest.num_elements
    alike = sum(t.num_elements for t in floats if t.num_bytes == item * t.num_elements)
    return model._replace(stored_floats=alike, stored_item=item)


def _is_plain(config: Json) -> bool:
    architectures = config.get("architectures")
    if any(config.get(field) for field in ("num_experts", "num_local_experts", "n_routed_experts")):
        return False
    return not isinstance(architectures, list) or not architectures or bool(set(map(str, architectures)) & set(BY_HAND))


def _asked(name: str, config: Json, tensors: list[Tensor]) -> Model:
    """Any other model: a worker's code counts it, a quantized checkpoint as if it were not quantized."""
    found, fields = sizes_on_rank(name, config), text_fields(config)
    quantization = fields.get("quantization_config") or fields.get("compression_config")
    is_quantized = bool(quantization) or any(tensor.name.endswith(".qweight") for tensor in tensors)
    packed = quantization if isinstance(quantization, dict) else {}
    dtype = str(fields.get("dtype") or fields.get("torch_dtype") or "").removeprefix("torch.") or None
    stored = dict.fromkeys((False, True), 0)
    for tensor in tensors if is_quantized else ():
        stored[".experts." in tensor.name] += tensor.num_bytes
    model = Model(
        name=name,
        sizes=found.sizes,
        max_model_len=_max_model_len(fields),
        dtype=dtype,
        num_parameters=found.num_parameters,
        is_tied=found.packed_elements[0] > 0,
        is_counted=False,
        has_kv_cache_scheme=has_kv_cache_scheme(packed),
        stored_bytes=stored[False],
        stored_expert_bytes=stored[True],
        quantization=packed if is_quantized else None,
        asked=config,
        expert_parameters=found.expert_parameters,
        packed_elements=found.packed_elements,
        items=found.items,
    )
    return _with_floats(model, tensors)


def has_kv_cache_scheme(quantization: Json) -> bool:
    """Whether a checkpoint was made for an 8-bit KV cache, as a worker reads its quantization_config."""
    method = quantization.get("quant_method")
    has_scheme = bool(quantization.get("kv_cache_scheme"))
    if OTHER_NAMES.get(str(method), method) == "modelopt":
        return has_scheme or quantization.get("kv_cache_quant_algo") == "FP8"
    return OTHER_NAMES.get(str(method), method) == "compressed-tensors" and has_scheme


def sizes_of(config: Json) -> ModelSizes:
    """Raises EstimateError for a config.json that lacks fields of a text decoder."""
    heads = _size(config, "num_attention_heads")
    hidden = _size(config, "hidden_size")
    architecture = next((name for name in map(str, config.get("architectures") or []) if name in BY_HAND), "LlamaForCausalLM")
    absent = None if "num_key_value_heads" in config else BY_HAND[architecture]
    kv_heads = _size(config, "num_key_value_heads", absent or heads)
    if heads % kv_heads:
        raise EstimateError(f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    is_qwen3 = architecture == "Qwen3ForCausalLM"
    head_dim = _size(config, "head_dim", 128 if is_qwen3 and "head_dim" not in config else hidden // heads)
    mlp = _size(config, "intermediate_size")
    layers = tuple(LayerSizes(heads, kv_heads, head_dim, window, mlp) for window in _windows(config))
    return ModelSizes(_size(config, "vocab_size"), hidden, layers)


def computed_parameters(sizes: ModelSizes, tied: bool) -> int:
    """Parameters of a decoder with RMSNorm, rotary embedding and a gated MLP, without biases."""
    hidden = sizes.hidden_size
    total = sizes.vocab_size * hidden * (1 if tied else 2) + hidden
    for layer in sizes.layers:
        total += hidden * (2 * layer.q_size + 2 * layer.kv_size + 3 * layer.intermediate_size + 2)
    return total


def on_rank(model: Model, size: int, *, expert_parallel: bool = False) -> Model:
    """The share of one of `size` GPUs: attention heads, MLP and an untied model's LM head are split; the embedding is whole.

    Raises EstimateError if the model cannot be split so.
    """
    if model.asked is not None:
        found = sizes_on_rank(model.name, model.asked, size, expert_parallel=expert_parallel)
        plain = model.num_parameters - model.expert_parameters
        return model._replace(
            sizes=found.sizes,
            num_parameters=found.num_parameters,
            expert_parameters=found.expert_parameters,
            packed_elements=found.packed_elements,
            stored_bytes=model.stored_bytes * (found.num_parameters - found.expert_parameters) // plain,
            stored_expert_bytes=model.stored_expert_bytes * found.expert_parameters // max(1, model.expert_parameters),
        )
    if expert_parallel:
        raise EstimateError(f"{model.name}: --enable-expert-parallel: the model has no experts; leave the flag out")

    def of(layer: LayerSizes) -> LayerSizes:
        kv_heads = layer.num_kv_heads
        for what, n in (("attention heads", layer.num_heads), ("the MLP's size", layer.intermediate_size)):
            if n % size:
                raise EstimateError(f"--tensor-parallel-size {size} does not divide {what} of {model.name} ({n})")
        if kv_heads % size and size % kv_heads:
            raise EstimateError(f"--tensor-parallel-size {size} does not fit the {kv_heads} KV heads of {model.name}")
        return layer._replace(
            num_heads=layer.num_heads // size,
            num_kv_heads=max(1, kv_heads // size),
            intermediate_size=layer.intermediate_size // size,
        )

    sizes = model.sizes._replace(layers=tuple(of(layer) for layer in model.sizes.layers))
    head = 0 if model.is_tied else model.sizes.vocab_size * model.sizes.hidden_size
    fewer = computed_parameters(model.sizes, model.is_tied) - computed_parameters(sizes, model.is_tied) + head - head // size
    kept = model.num_parameters - fewer
    stored = model.stored_bytes * kept // model.num_parameters
    return model._replace(sizes=sizes, num_parameters=kept, stored_bytes=stored)


def _size(config: Json, name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or not 1 <= value <= (_MAX_LAYERS if name == "num_hidden_layers" else 1 << 30):
        raise EstimateError(f"config.json: {name} must be a positive integer, not {value!r:.80}")
    return value


def _windows(config: Json) -> list[int]:
    """Each layer's sliding window, 0 for none: by layer_types, or by the families' own fields."""
    num_layers, types = _size(config, "num_hidden_layers"), config.get("layer_types")
    architectures = config.get("architectures") or [""]
    family = next((f for f in ("Mistral", "Qwen2", "Qwen3") if str(architectures[0]).startswith(f)), "")
    if not family or (family != "Mistral" and not config.get("use_sliding_window")):
        return [0] * num_layers
    absent = "sliding_window" in config and config["sliding_window"] is None
    window = 0 if absent else _size(config, "sliding_window", 4096)
    if family == "Mistral":
        return [window] * num_layers
    if isinstance(types, list) and len(types) == num_layers:
        return [window if kind == "sliding_attention" else 0 for kind in types]
    first = config.get("max_window_layers")
    first = 28 if type(first) is not int else first
    return [window if i >= first else 0 for i in range(num_layers)]


def _max_model_len(config: Json) -> int:
    try:
        return checked_context(_stretched(config))
    except ValueError as error:
        raise EstimateError(str(error)) from None


def _stretched(config: Json) -> int:
    """max_position_embeddings, stretched as the core does (enginecore/loading/model_files.py)."""
    positions = _size(config, "max_position_embeddings")
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise EstimateError("config.json: rope_scaling must be an object")
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
    if kind not in ("linear", "yarn") or not is_stretched(config) or not isinstance(factor, int | float):
        return positions
    if not 1 <= factor <= 1 << 20:
        return positions
    original = config.get("original_max_position_embeddings", rope.get("original_max_position_embeddings"))
    if kind == "yarn" and isinstance(original, int) and original > 0:
        positions = original
    return int(positions * factor)


# -------------------------------------------------------------------------------------------------------------- files
def _with_modelopt(config: Json, folder: Path) -> Json:
    """The config with what ModelOpt's older exports say in a file of their own."""
    path = folder / "hf_quant_config.json"
    said = text_fields(config).get("quantization_config") or config.get("quantization_config")
    if said or not path.is_file() or not isinstance(found := _json(path).get("quantization"), dict):
        return config
    return {**config, "quantization_config": {"quant_method": "modelopt", **found}}


def _json(path: Path) -> Json:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise EstimateError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise EstimateError(f"{path} is not a JSON object")
    return value


def _local_tensors(folder: Path) -> Iterator[Tensor]:
    paths = [path for path in [weights_file(folder)] if path is not None]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            paths = [folder / name for name in sorted(set(_json(index)["weight_map"].values()))]
        except (KeyError, TypeError, AttributeError):
            raise EstimateError(f"{index} is not a safetensors index") from None
    for path in paths:
        if path.is_file():
            yield from _tensors(path)


def _tensors(path: Path) -> Iterator[Tensor]:
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(file.read(size))
        for name, tensor in header.items():
            if name != "__metadata__":
                start, stop = tensor["data_offsets"]
                if not all(type(number) is int and number >= 0 for number in (start, stop, *tensor["shape"])):
                    raise ValueError(f"sizes of {name:.80} that are none")
                yield Tensor(name, math.prod(tensor["shape"]), stop - start)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise EstimateError(f"{path} is not a safetensors file: {error}") from None


def _of_hub(
    name: str, revision: str | None, download_dir: str | None, token: str | None
) -> tuple[Json, list[Tensor], str | None]:
    """config.json, the weights' tensors, and the folder of both if they were downloaded."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        # as the server does: without a hub this fails at once, where hf_hub_download retries for half a minute
        found = huggingface_hub.snapshot_download(
            name, revision=revision, cache_dir=download_dir, token=token, allow_patterns=["config.json"]
        )
        folder = Path(found)
        if local := list(_local_tensors(folder)):
            return _json(folder / "config.json"), local, str(folder)
        files = huggingface_hub.get_safetensors_metadata(name, revision=revision, token=token).files_metadata.values()
        config = _json(folder / "config.json")
    except EstimateError:
        raise
    except errors.LocalEntryNotFoundError:
        raise EstimateError(
            f"{name} is no local folder, and the hub cannot be reached: connect, or give a local folder"
        ) from None
    except errors.RepositoryNotFoundError:
        raise EstimateError(f"{name} is neither a local folder nor a model on the hub that HF_TOKEN may read") from None
    except errors.HFValidationError:
        raise EstimateError(f"{name} is neither a folder nor a hub id (like owner/name)") from None
    except Exception as error:  # the hub's errors, from any HTTP library that huggingface_hub uses
        reason = (str(error).strip().splitlines() or [""])[0]
        raise EstimateError(f"{name} is no local folder, and of the hub: {type(error).__name__}: {reason}") from None
    found_tensors = ((tensor, info) for file in files for tensor, info in file.tensors.items())
    return (
        config,
        [Tensor(tensor, math.prod(info.shape), info.data_offsets[1] - info.data_offsets[0]) for tensor, info in found_tensors],
        None,
    )
