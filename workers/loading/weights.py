"""Fills a model's parameters: from safetensors files, or with random numbers (`--load-format dummy`).

Every checkpoint tensor has one target, a view of a parameter on the device (layers.Target). Files are memory-mapped, and
slices go from the map straight to the device, where they are converted to the parameter's dtype: the host never holds a second
copy. Several threads do it side by side, each a tensor at a time. Names and shapes are all checked before the first byte is
copied; what is missing, surplus or misshapen is named at once.
Pickled checkpoints (.bin, .pt) are refused: reading one runs code of whoever wrote it.
"""

import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from tqdm import tqdm

from quire.workers.layers.linear import RMSNorm, Target
from quire.workers.models.decoder import CausalLM

READERS = 4  # threads, each of which reads and copies by turns
SLICE_BYTES = 64 << 20  # of a tensor, copied at once by a reader: bounds the temporary of a dtype conversion
DTYPES = {"F32": 4, "F16": 2, "BF16": 2}  # of safetensors files, bytes; others are quantised weights or no weights
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
INERT_SUFFIXES = (".rotary_emb.inv_freq", ".self_attn.masked_bias", ".attn.masked_bias")  # buffers of old transformers
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MAX_NAMES = 12  # shown of each kind of problem


class WeightsError(ValueError):
    """The checkpoint does not fit the model or cannot be read; the text is meant for the user."""


class Source(NamedTuple):
    """A tensor in a checkpoint file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES.get(self.dtype, 0)


def load_weights(model: CausalLM, model_dir: str | Path, device: torch.device | str, progress: bool = True) -> int:
    """Fill all parameters of `model`, which live on `device`, from the folder's safetensors. Returns the bytes read.

    Progress over bytes is shown on standard error where that is a terminal. Raises WeightsError.
    """
    files = checkpoint_files(Path(model_dir))
    sources = _sources(files)
    targets = checkpoint_targets(model)
    if model.config.tie_word_embeddings and HEAD in sources:
        if EMBED in sources:
            _check_tied(sources)
            del sources[HEAD]
        else:
            targets[HEAD] = targets.pop(EMBED)
    _check_fit(sources, targets)
    wanted = {name: source for name, source in sources.items() if name in targets}
    total = sum(source.num_bytes for source in wanted.values())
    with (
        tqdm(
            total=total, unit="B", unit_scale=True, desc="Loading weights", disable=not (progress and sys.stderr.isatty())
        ) as bar,
        ExitStack() as opened,
        ThreadPoolExecutor(READERS, "weights") as readers,
    ):
        maps = {file: opened.enter_context(_open(file)) for file in files}
        copies = {readers.submit(_copy, maps[source.file], name, targets[name]): source for name, source in wanted.items()}
        try:
            for copy in as_completed(copies):
                copy.result()  # raises what it failed with
                bar.update(copies[copy].num_bytes)
        finally:
            readers.shutdown(cancel_futures=True)
            if torch.device(device).type == "cuda":
                torch.cuda.synchronize(device)  # before the maps are closed, every copy must have left them
                torch.cuda.empty_cache()  # conversions' temporaries, which belong to the readers' streams
    return total


def checkpoint_targets(model: CausalLM) -> dict[str, Target]:
    """Checkpoint tensor name -> where it goes, for all tensors that a checkpoint of this model holds."""
    targets: dict[str, Target] = {}
    for name, module in model.named_modules():
        if hasattr(module, "targets"):
            targets.update(module.targets(name))
    return targets


def dummy_weights(model: CausalLM, seed: int) -> None:
    """Random parameters, made on the device, the same for the same seed and device: norms 1, others uniform.

    Their standard deviation is config.initializer_range.
    """
    norms = {id(module.weight) for module in model.modules() if isinstance(module, RMSNorm)}
    limit = model.config.initializer_range * 3**0.5  # uniform on ±limit: much faster than normal on a CPU
    generator: torch.Generator | None = None
    with torch.no_grad():
        for parameter in model.parameters():
            if generator is None:
                generator = torch.Generator(parameter.device).manual_seed(seed)
            if id(parameter) in norms:
                parameter.fill_(1.0)
            else:
                parameter.uniform_(-limit, limit, generator=generator)


def checkpoint_files(model_dir: Path) -> list[Path]:
    """The safetensors files of a folder: model.safetensors, or those that its index names. Raises WeightsError."""
    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        return _indexed_files(index)
    single = model_dir / "model.safetensors"
    if single.exists():
        return [single]
    if any(path.suffix in PICKLED for path in model_dir.iterdir()):
        raise WeightsError(
            f"{model_dir} holds pickled weights (.bin, .pt) only. Quire reads safetensors, because unpickling runs code "
            "from the file; convert the checkpoint first (transformers' save_pretrained writes safetensors)."
        )
    raise WeightsError(f"{model_dir} holds no model.safetensors and no model.safetensors.index.json")


def _indexed_files(index: Path) -> list[Path]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise WeightsError(f"{index} is not a safetensors index") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise WeightsError(f"{index} names {name!r}, which is not a safetensors file of the same folder")
        if not (index.parent / name).exists():
            raise WeightsError(f"{index} names {name}, which is not there: the download may be incomplete")
    return [index.parent / name for name in names]


def _open(file: Path) -> Any:
    try:
        return safetensors.safe_open(file, framework="pt", device="cpu")
    except (safetensors.SafetensorError, OSError) as error:
        raise WeightsError(f"{file} cannot be read as safetensors: {error}") from None


def _sources(files: list[Path]) -> dict[str, Source]:
    sources: dict[str, Source] = {}
    for file in files:
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                part = tensors.get_slice(name)
                if name in sources:
                    raise WeightsError(f"tensor {name} is in {sources[name].file.name} and in {file.name}")
                sources[name] = Source(file, tuple(part.get_shape()), part.get_dtype())
    return sources


def _check_fit(sources: dict[str, Source], targets: dict[str, Target]) -> None:
    """Raise one WeightsError that names every tensor that is missing, surplus, of another shape or of another kind."""
    missing = [name for name in targets if name not in sources]
    surplus = [name for name in sources if name not in targets and not name.endswith(INERT_SUFFIXES)]
    misshapen = [
        f"{name} is {list(sources[name].shape)}, expected {list(target.full_shape)}"
        for name, target in targets.items()
        if name in sources and sources[name].shape != target.full_shape
    ]
    foreign = [f"{name} is {sources[name].dtype}" for name in targets if name in sources and sources[name].dtype not in DTYPES]
    problems = [
        f"{what}: {_listed(names)}"
        for what, names in (
            ("missing", missing),
            ("surplus", surplus),
            ("misshapen", misshapen),
            ("of an unsupported dtype", foreign),
        )
        if names
    ]
    if problems:
        raise WeightsError("the checkpoint does not fit the model that config.json describes. Tensors " + "; ".join(problems))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def _check_tied(sources: dict[str, Source]) -> None:
    """A tied checkpoint may hold both names, with equal values: else it is not tied, whatever its config.json says."""
    with _open(sources[EMBED].file) as a, _open(sources[HEAD].file) as b:
        if not torch.equal(a.get_tensor(EMBED), b.get_tensor(HEAD)):
            raise WeightsError(
                "config.json ties the word embeddings, but the checkpoint holds an lm_head.weight of its own that differs: "
                "set tie_word_embeddings to false"
            )


@torch.no_grad()
def _copy(tensors: Any, name: str, target: Target) -> None:
    """Copy this rank's part of a memory-mapped tensor to the device, slice by slice; the device converts the dtype."""
    device, part = target.tensor.device, tensors.get_tensor(name)[target.part]
    row_bytes = max(1, part[:1].numel() * part.element_size())
    rows = max(1, SLICE_BYTES // row_bytes)
    with torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext():
        for start in range(0, part.shape[0], rows):
            piece = part[start : start + rows]
            if piece.dtype != target.tensor.dtype:
                piece = piece.to(device)
            target.tensor[start : start + rows].copy_(piece)
