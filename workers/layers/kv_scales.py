"""The checkpoint's scales of an attention layer's keys and values in an 8-bit KV cache: k = cached k · k_scale.

A layer owns a KVScales (`kv_scales`) if its cache has 8 bits; with 16 bits these tensors are skipped (loading/fit.py). They are
numbers on the host; the cache holds them for the kernels (attention/kv_cache.py). A scale that the checkpoint lacks is 1.0, and
the worker warns (`warn_of_scales`).
"""

import logging
import math
from collections.abc import Iterator
from functools import partial

import torch

from quire.workers.layers.module import WeightOwner
from quire.workers.loading.weight_loader import FLOATS, WeightLoader

log = logging.getLogger("quire.workers")

# after "…self_attn."; the first found counts: compressed-tensors' and vLLM's, ModelOpt's, AutoFP8's, and one for both
K_NAMES = ("k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale", "attn.kv_scale")
V_NAMES = ("v_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale", "attn.kv_scale")


class KVScales(WeightOwner):
    """`k` and `v` are None if the checkpoint has none."""

    k: float | None = None
    v: float | None = None

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[str, float] = {}

    def loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        prefix = name.rpartition(".")[0]
        for scale in dict.fromkeys((*K_NAMES, *V_NAMES)):
            yield (
                f"{prefix}.{scale}",
                WeightLoader((), (), FLOATS, partial(self._take, scale), or_shapes=((1,), (1, 1)), is_optional=True),
            )

    def _take(self, name: str, piece: torch.Tensor, row: int) -> None:
        self._found[name] = float(piece)

    def finish(self) -> None:
        """Choose among the scales found. Packers write -1 or 0 for a scale that they have not measured."""
        usable = {name: scale for name, scale in self._found.items() if scale > 0 and math.isfinite(scale)}
        self.k = next((usable[name] for name in K_NAMES if name in usable), None)
        self.v = next((usable[name] for name in V_NAMES if name in usable), None)


def warn_of_scales(scales: dict[int, KVScales]) -> None:
    """Warn of absent scales. scales: by layer, for layers with an 8-bit cache."""
    if absent := [layer for layer, found in scales.items() if found.k is None or found.v is None]:
        log.warning(
            "the KV cache has 8 bits, and the checkpoint has no scales of keys and values for %d of %d layers: 1.0 is taken, "
            "which may cost accuracy",
            len(absent),
            len(scales),
        )
