"""LoRA adapters as they travel between processes: the limits of an engine, and what is known of one adapter's files."""

import unicodedata
from collections.abc import Iterable

import msgspec


class AdapterError(ValueError):
    """An adapter that cannot be used. The message names the field or the tensor, and is safe to show to a client."""


class AdapterMissing(AdapterError):
    """There is no such adapter."""


class AdapterLimits(msgspec.Struct, frozen=True):
    """Bounds of an engine that serves adapters. All ranks have the same."""

    max_loras: int = 8  # adapter slots on the device
    max_rank: int = 16
    max_cpu_loras: int = 32  # adapters that a worker keeps in host memory
    target_modules: tuple[str, ...] = ()  # names of layers that a slot holds; empty: attention, MLP and shared experts
    dtype: str = ""  # of an adapter's tensors on the device; empty: the model's
    has_head: bool = False  # whether a slot also holds the head, ...
    has_embedding: bool = False
    has_routers: bool = False
    has_experts: bool = False
    dirs: tuple[str, ...] = ()  # folders below which adapters may be loaded while the engine serves; empty: none
    captures: bool = False  # whether graphs with adapters are captured at the start
    on_demand: bool = False  # the name of a folder in one of `dirs` is a model's name
    tasks: tuple[str, ...] = ()  # adapters of the model's own tasks
    default_task: str = ""  # of requests that name none; empty: the model itself
    has_hub: bool = False  # adapters may be downloaded while the engine serves

    @property
    def default(self) -> "AdapterUse | None":
        """The adapter of requests that name none."""
        return AdapterUse(self.default_task) if self.default_task else None


class AdapterFile(msgspec.Struct, frozen=True):
    """One version of one adapter's weights. All ranks must find the same."""

    folder: str
    device: int
    inode: int
    size: int  # bytes
    mtime_ns: int


class AdapterTensor(msgspec.Struct, frozen=True):
    """A tensor of the file: where its bytes lie."""

    name: str  # the file's own, for errors
    dtype: str  # safetensors' name: "F32", "F16", "BF16"
    shape: tuple[int, ...]
    offset: int  # bytes from the file's beginning
    num_bytes: int


class AdapterPart(msgspec.Struct, frozen=True):
    """The part of an adapter for one layer: scale * B A x, or for stacked experts the same by expert."""

    layer: str  # the checkpoint's name of the layer or parameter, without "base_model.model." and without PEFT's suffixes
    rank: int
    scale: float
    a: AdapterTensor
    b: AdapterTensor


class AdapterPlan(msgspec.Struct, frozen=True):
    """An adapter as `read_adapter` (workers/adapters/peft.py) has read and checked its folder."""

    file: AdapterFile
    parts: list[AdapterPart]
    base_model: str = ""  # the config's base_model_name_or_path
    invocation_tokens: tuple[int, ...] = ()  # of an activated LoRA; empty: a plain one
    peft_version: str = ""


def with_layers_of(limits: AdapterLimits, plans: Iterable[AdapterPlan]) -> AdapterLimits:
    """A slot also holds the head, the embedding, routers and experts where one of these adapters has them."""
    layers = {part.layer for plan in plans for part in plan.parts}
    names = {layer.rpartition(".")[2] for layer in layers}
    return msgspec.structs.replace(
        limits,
        has_head="lm_head" in names,
        has_embedding=bool(names & {"embed_tokens", "wte", "word_embeddings"}),
        has_routers=bool(names & {"gate", "router"}),
        has_experts=any(".experts" in layer for layer in layers),
    )


class AdapterInfo(msgspec.Struct, frozen=True):
    """A loaded adapter, as frontends know it."""

    name: str
    file: AdapterFile
    base_model: str = ""
    loaded_at: float = 0.0  # seconds since the Unix epoch; 0: with the engine's start


class AdapterUse(msgspec.Struct, frozen=True):
    """The adapter that a request asks for. file: as the frontend knows it. A request that an engine which was lost has run goes
    on only with the same file; any other gets what its name stands for when it arrives."""

    name: str
    file: AdapterFile | None = None


class FolderQuestion(msgspec.Struct, frozen=True, array_like=True):
    """The question to the process that reads folders (workers/adapters/reading.py)."""

    folder: str
    limits: AdapterLimits


class ReadingConfig(msgspec.Struct, frozen=True):
    """The configuration of the process that reads folders."""

    socket_fd: int


class FolderAnswer(msgspec.Struct, frozen=True, array_like=True):
    """error: why the folder cannot be used; empty if it can."""

    error: str
    plan: AdapterPlan | None = None


HOST_ONLY = -1  # in place of an adapter slot: the adapter is read, checked and kept in host memory
MAX_NAME = 256  # characters of an adapter's name


def problem_with_name(name: str) -> str | None:
    """The problem with an adapter's name, which is a model's name in requests and part of a metric's label."""
    if not name or len(name) > MAX_NAME:
        return f"an adapter's name must have 1 to {MAX_NAME} characters"
    if any(c in ",\"'" or unicodedata.category(c) in ("Cc", "Cs") for c in name):
        return "an adapter's name must hold no comma, quote or control character"
    return None
