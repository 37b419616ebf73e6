"""Numerics: settings that decide an engine's answers beside its model's files. Engines that differ in one answer differently.

A worker reports its own, with defaults resolved (workers/numerics.py). Frontends compare them before they use several engines
as one (frontend/replicas/replica_answers.py). Capacity is not part of it: fewer tokens or sequences change no answer.
"""

import msgspec

_FLAGS = {
    "dtype": "--dtype",
    "quantization": "--quantization",
    "kv_cache_dtype": "--kv-cache-dtype",
    "long_rope": "--max-model-len, by which longrope has its long factors or its short ones",
    "dummy_seed": "--load-format dummy with --seed",
    "logits_processors": "--logits-processors",
}


class Numerics(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Settings of one engine, with the flags' values."""

    dtype: str = ""  # of weights and activations
    quantization: str = ""  # its method; empty: floats
    kv_cache_dtype: str = "auto"  # a dtype, and layers that are excepted
    long_rope: bool = False
    dummy_seed: int | None = None  # None: the weights are the checkpoint's
    logits_processors: list[str] = []  # names of classes


def differing_flags(one: Numerics, other: Numerics) -> str:
    """The flags in which two engines differ, with both values; empty if there are none."""
    pairs = {flag: (getattr(one, name), getattr(other, name)) for name, flag in _FLAGS.items()}
    return ", ".join(f"{flag} ({_shown(a)} and {_shown(b)})" for flag, (a, b) in pairs.items() if a != b)


def _shown(value: object) -> str:
    match value:
        case list():
            return " ".join(value) or "none"
        case None | "":
            return "none"
        case bool():
            return "long" if value else "short"
    return str(value)
