"""Fills a model's parameters: from safetensors files, or with random numbers (`--load-format dummy`).

Every checkpoint tensor has one weight loader (weight_loader.py), which a weight owner of the model made. Files are mapped into
memory, and slices go from the map to the loader, mostly straight to the device, where they are converted to the parameter's
dtype: the host never holds a second copy. Several threads copy concurrently, each one tensor at a time; meanwhile, owners that
have all their tensors are finished. Names, dtypes and shapes are all checked before the first byte is copied (fit.py).
"""

import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from threading import Lock, local
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from quire.workers.layers.module import WeightOwner
from quire.workers.loading.checkpoint_tensor import CheckpointTensor
from quire.workers.loading.files import checkpoint_tensors, open_file
from quire.workers.loading.fit import check_fit
from quire.workers.loading.mapped import forget, trim
from quire.workers.loading.task_adapter import with_task
from quire.workers.loading.weight_loader import WeightLoader, WeightsError
from quire.workers.models.language_model import Fit, LanguageModel
from quire.workers.models.stage_boundary import MissingLayer

READERS = 4  # threads, each of which alternates between reading and copying
SLICE_BYTES = 64 << 20  # copied at once by a reader: bounds the temporary of a dtype conversion
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_of_reader = local()  # readers' threads end with the load


class Copy(NamedTuple):
    """A tensor on its way to its owner."""

    name: str
    owner: WeightOwner
    num_bytes: int


def load_weights(model: LanguageModel, model_dir: str | Path, device: torch.device | str, progress: bool = True) -> int:
    """Fill and finish all parameters of `model`, which are on `device`, from the folder's safetensors. Returns the bytes read.

    Progress in bytes is shown on standard error if that is a terminal. Raises WeightsError.
    """
    device, tensors = torch.device(device), checkpoint_tensors(Path(model_dir), model.config.names)
    tensors, loaders, owners = model.converted(Fit(tensors, weight_loaders(model), _owners(model)))
    if (folder := model.config.task_adapter) is not None:
        tensors, loaders, owners = with_task(Fit(tensors, loaders, owners), Path(folder), model.config.names)
    if model.config.tie_word_embeddings and HEAD in tensors:
        if EMBED in tensors:
            _check_tied(tensors)
            del tensors[HEAD]
        elif EMBED in loaders:
            loaders[HEAD], owners[HEAD] = loaders.pop(EMBED), owners.pop(EMBED)
    for name in [name for name in tensors if name not in loaders and name.startswith(_elsewhere(model))]:
        del tensors[name]
    check_fit(tensors, loaders, model.config.quantization)
    loaders = {name: loader for name, loader in loaders.items() if loader.is_read}
    owners = {name: owner for name, owner in owners.items() if name in loaders}
    loading = _Loading({name: owner for name, owner in owners.items() if name in tensors}, device)
    num_bytes = sum(tensor.num_bytes for name, tensor in tensors.items() if name in loaders)
    with (
        tqdm(
            total=num_bytes, unit="B", unit_scale=True, desc="Loading weights",
            disable=not (progress and sys.stderr.isatty()),
        ) as bar,
        ExitStack() as opened,
        ThreadPoolExecutor(READERS, "weights") as readers,
    ):  # fmt: skip
        files = {tensor.file for name, tensor in tensors.items() if name in loaders}
        maps = {file: opened.enter_context(open_file(file)) for file in files}
        group = _LoaderGroup([loaders[name] for name in tensors if name in loaders])
        copies: dict[Future[Any], Copy] = {
            readers.submit(_copy, maps[tensor.file], tensor, loaders[name], group, device): Copy(
                name, owners[name], tensor.num_bytes
            )
            for name, tensor in tensors.items()
            if name in loaders
        }
        try:
            for copy in as_completed(copies):
                del loaders[copies[copy].name]  # it holds a view of a weight, which a CPU's owner packs and frees
                loading.arrived(copies[copy].owner, copy.result())  # raises the copy's exception
                bar.update(copies[copy].num_bytes)
        finally:
            readers.shutdown(cancel_futures=True)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # copies must be finished before the maps are closed
                torch.cuda.empty_cache()  # frees conversions' temporaries, which belong to the readers' streams
    loading.finish_others(model)
    if device.type == "cpu":
        trim()
    return num_bytes


class _LoaderGroup:
    """Loaders with the same `then`: how many of them still miss their tensor, and when the others were copied."""

    def __init__(self, loaders: list[WeightLoader]):
        self._lock = Lock()
        self._missing = Counter(loader.then for loader in loaders)
        self._copied: dict[Callable[[], None], list[torch.cuda.Event]] = {}
        self._mapped: dict[Callable[[], None], list[torch.Tensor]] = {}

    def written(self, then: Callable[[], None], copied: torch.cuda.Event | None, mapped: torch.Tensor | None = None) -> None:
        """Note that a loader is written. The last one's reader calls `then` on its stream, ordered after the others' copies.

        mapped: the tensor in its file, which is let go afterwards.
        """
        with self._lock:
            tensors = self._mapped.setdefault(then, [])
            if mapped is not None:
                tensors.append(mapped)
            events = self._copied.setdefault(then, [])
            if copied is not None:
                events.append(copied)
            self._missing[then] -= 1
            if self._missing[then]:
                return
            del self._missing[then], self._copied[then], self._mapped[then]  # these hold the memory that they write to
        for event in events:
            torch.cuda.current_stream().wait_event(event)
        then()
        for tensor in tensors:
            forget(tensor)


class _Loading:
    """How many tensors each owner waits for. Owners are finished on the main thread, which later runs their products."""

    def __init__(self, owners: dict[str, WeightOwner], device: torch.device):
        self._device = device
        self._missing: dict[WeightOwner, int] = {}
        for owner in owners.values():
            self._missing[owner] = self._missing.get(owner, 0) + 1

    @torch.no_grad()
    def arrived(self, owner: WeightOwner, copied: torch.cuda.Event | None) -> None:
        """Note that one of the owner's tensors has been copied; on CUDA it has once `copied` is reached."""
        if copied is not None:
            torch.cuda.current_stream(self._device).wait_event(copied)
        self._missing[owner] -= 1
        if not self._missing[owner] and not owner.is_tied:
            owner.finish()

    @torch.no_grad()
    def finish_others(self, model: LanguageModel) -> None:
        """Finish an LM head that is tied to the embedding (it may have its own bias), and owners that take no tensors."""
        for _, owner in weight_owners(model):
            if owner not in self._missing or owner.is_tied:
                owner.finish()


def weight_owners(model: LanguageModel) -> Iterator[tuple[str, WeightOwner]]:
    """All modules that own parameters, by their names in the model."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, WeightOwner))


def _elsewhere(model: LanguageModel) -> tuple[str, ...]:
    """Prefixes of the names of tensors that other stages have."""
    return tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, MissingLayer))


def weight_loaders(model: LanguageModel) -> dict[str, WeightLoader]:
    """Checkpoint tensor name -> its loader, for all tensors of a checkpoint of this model."""
    return {tensor: loader for name, owner in weight_owners(model) for tensor, loader in owner.loaders(name)}


def _owners(model: LanguageModel) -> dict[str, WeightOwner]:
    """Checkpoint tensor name -> its owner."""
    return {tensor: owner for name, owner in weight_owners(model) for tensor, _ in owner.loaders(name)}


@torch.no_grad()
def dummy_weights(model: LanguageModel, seed: int) -> None:
    """Fill and finish all parameters with random values, drawn on the device: norms with 1, others uniformly.

    The standard deviation is config.initializer_range. An owner's values depend on the seed, its name and the device alone, not
    on what else is on this rank.
    """
    limit = model.config.initializer_range * 3**0.5  # uniform on ±limit: much faster than normal on a CPU
    owners = dict(weight_owners(model))
    generator = torch.Generator(next(model.parameters()).device)
    for name, owner in owners.items():
        digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
        owner.fill_dummy(limit, generator.manual_seed(int.from_bytes(digest, "little") >> 1))
    for owner in owners.values():
        owner.finish()


def _check_tied(tensors: dict[str, CheckpointTensor]) -> None:
    """A tied checkpoint may contain both tensors if they are equal; otherwise it is not tied, whatever config.json says."""
    with open_file(tensors[EMBED].file) as a, open_file(tensors[HEAD].file) as b:
        if not torch.equal(a.get_tensor(tensors[EMBED].name), b.get_tensor(tensors[HEAD].name)):
            raise WeightsError(
                "config.json ties the word embeddings, but the checkpoint holds an lm_head.weight of its own that differs: "
                "set tie_word_embeddings to false"
            )


@torch.no_grad()
def _copy(
    file: Any, tensor: CheckpointTensor, loader: WeightLoader, group: _LoaderGroup, device: torch.device
) -> torch.cuda.Event | None:  # fmt: skip
    """Feed this rank's shard of a mapped tensor to its loader, slice by slice. Returns, on CUDA, the event of its end."""
    if device.type != "cuda":
        _write(file, tensor, loader)
        if loader.then is None:
            forget(file.get_tensor(tensor.name))
        else:
            group.written(loader.then, None, file.get_tensor(tensor.name))
        return None
    with torch.cuda.device(device), torch.cuda.stream(_stream(device)):
        _write(file, tensor, loader)
        copied = torch.cuda.current_stream().record_event()
        if loader.then is not None:
            group.written(loader.then, copied)
            copied = torch.cuda.current_stream().record_event()
        return copied


def _stream(device: torch.device) -> torch.cuda.Stream:
    """The reader's only stream: memory that is freed on a stream can be reused on that stream alone."""
    if not hasattr(_of_reader, "stream"):
        _of_reader.stream = torch.cuda.Stream(device)
    return _of_reader.stream  # type: ignore[no-any-return]


def _write(file: Any, tensor: CheckpointTensor, loader: WeightLoader) -> None:
    shard = file.get_tensor(tensor.name)[tensor.within][loader.shard]
    if not shard.dim():
        return loader.write(shard, 0)
    row_bytes = max(1, shard[:1].numel() * shard.element_size())
    rows = max(1, SLICE_BYTES // row_bytes)
    for start in range(0, shard.shape[0], rows):
        loader.write(shard[start : start + rows], start)
