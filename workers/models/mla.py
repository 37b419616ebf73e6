"""The projections around latent attention (workers/attention/latent.py): DeepSeek's, in place of blocks.SelfAttention.

    q = W_q h, or W_qb norm(W_qa h): heads of N elements that are not rotated and R that are
    c | r = W_kva h: the latent of L elements and R rotated ones, the same for all heads
    keys of a head are W_k c | r, its values W_v c, where W_k and W_v are slices of kv_b_proj

W_k is multiplied into q, W_v into the result: neither keys nor values are ever computed. Heads are split over the ranks; every
rank has the whole latents and their whole cache.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from quire.workers.attention.latent import Latents
from quire.workers.layers.formats.activations import rounded_for
from quire.workers.layers.linear import Linear, Placement
from quire.workers.layers.module import Module, WeightOwner, fill_cut, new_parameter
from quire.workers.layers.norm import Norm, RMSNorm
from quire.workers.loading.quantized.packed_weight import PackedWeight
from quire.workers.loading.weight_loader import WeightLoader, copied
from quire.workers.models.config import AttentionSpec, LatentSizes
from quire.workers.models.step_context import StepContext
from quire.workers.shard import Shard, whole

EPS = 1e-6  # of both norms here, whatever the model's is


class KeysAndValues(WeightOwner):
    """kv_b_proj of this rank's heads: weight [Hq, N + V, L], each head's keys before its values."""

    def __init__(self, heads: Shard, sizes: LatentSizes, place: Placement):
        super().__init__()
        self._rows, self._columns = heads.times(sizes.nope + sizes.value), whole(sizes.latent)
        self._nope = sizes.nope
        self.weight = new_parameter((heads.size, sizes.nope + sizes.value, sizes.latent), place.dtype, place.device)
        packings = place.packings(self._columns, {"kv_b_proj": self._rows})
        self._packed = [PackedWeight(packing, self._rows, self._columns, place.device) for packing in packings.values()]

    @property
    def rounded(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Rounds latents if the checkpoint quantizes kv_b_proj's inputs, since only kv_b_proj reads them; None otherwise."""
        packed = next(iter(self._packed), None)
        return None if packed is None or packed.activations is None else partial(rounded_for, layer=packed)

    def into_queries(self, q: torch.Tensor) -> torch.Tensor:
        """q [T, Hq, N] -> [Hq, T, L]"""
        return torch.bmm(q.transpose(0, 1), self.weight[:, : self._nope])

    def values(self, out: torch.Tensor) -> torch.Tensor:
        """Attention's output [T, Hq, L] -> [T, Hq V]"""
        w = self.weight[:, self._nope :]
        y = out.new_empty(len(out), *w.shape[:2])
        torch.bmm(out.transpose(0, 1), w.transpose(1, 2), out=y.transpose(0, 1))  # in o_proj's layout, without a copy
        return y.flatten(1)

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        shape = self._rows.full // self.weight.shape[1], *self.weight.shape[1:]
        fill_cut(self.weight, shape, lambda whole: whole.flatten(0, 1)[self._rows.slice].view_as(self.weight), limit, generator)

    def loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        rows = self.weight.flatten(0, 1)
        for packed in self._packed:
            yield from packed.loaders(name, False, partial(packed.dequantize_into, rows, name))
        if not self._packed:
            yield f"{name}.weight", copied(rows, (self._rows, self._columns))


class LatentAttention(Module):
    """`self_attn` in a block and in the checkpoint. Has the interface of blocks.SelfAttention."""

    def __init__(self, spec: AttentionSpec, sizes: LatentSizes, hidden_size: int, place: Placement, layer: int):
        super().__init__()
        self.layer, place, hidden = layer, place.at("self_attn"), whole(hidden_size)
        heads = place.parallel.split(spec.num_heads)
        q, kv, norm = (
            heads.times(sizes.nope + sizes.rotary),
            whole(sizes.latent + sizes.rotary),
            (EPS, place.dtype, place.device),
        )
        self._nope, self._heads = sizes.nope, heads.size
        if sizes.q_latent:
            self.down_proj = Linear(hidden, {"q_a_proj": whole(sizes.q_latent), "kv_a_proj_with_mqa": kv}, False, place)
            self.q_a_layernorm = RMSNorm(sizes.q_latent, *norm)
            self.q_b_proj = Linear(whole(sizes.q_latent), {"q_b_proj": q}, False, place)
        else:
            self.down_proj = Linear(hidden, {"q_proj": q, "kv_a_proj_with_mqa": kv}, False, place)
        self._has_q_latent, self._q_end = bool(sizes.q_latent), sizes.q_latent or q.size
        self.kv_a_layernorm = RMSNorm(sizes.latent, *norm)
        self.kv_b_proj = KeysAndValues(heads, sizes, place)
        self.o_proj = Linear(heads.times(sizes.value), {"o_proj": hidden}, False, place)

    def forward(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        norm: Norm,
        context: StepContext,
        logits_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """With logits_indices, the output of these tokens only, as in blocks.SelfAttention."""
        y, residual = self.down_proj.normed(x, residual, norm)
        q, kv = y[:, : self._q_end], y[:, self._q_end :]
        if self._has_q_latent:
            q = self.q_b_proj(self.q_a_layernorm(q))
        q = q.unflatten(1, (self._heads, -1))
        weight, rounded = self.kv_a_layernorm.weight, self.kv_b_proj.rounded
        latents = Latents(q, self.kv_b_proj.into_queries(q[..., : self._nope]), kv, weight, EPS, rounded)
        out = context.attend(self.layer, latents, None, None)
        if logits_indices is not None:
            out, residual = out.index_select(0, logits_indices), residual.index_select(0, logits_indices)
        return self.o_proj.split_k(self.kv_b_proj.values(out)), residual
