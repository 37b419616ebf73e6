"""Numerics: what an engine's answers follow from beside its model's files. Engines that differ in it do not answer alike.

A worker says it of itself, defaults resolved (workers/numerics.py); frontends compare it before they use several engines as one
(frontend/replicas/replica_answers.py). Room is no part of it: who holds less tokens or sequences computes the same.
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
    """Of one engine; values as flags have them."""

    dtype: str = ""  # of weights and activations
    quantization: str = ""  # its method; empty: floats
    kv_cache_dtype: str = "auto"  # dtype, or what else, and of which layers
    long_rope: bool = False
    dummy_seed: int | None = None  # None: the weights were read
    logits_processors: list[str] = []  # classes' names


def differing_flags(one: Numerics, other: Numerics) -> str:
    """The flags by which two engines' answers differ, with both values; empty if there are none."""
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
