"""A mixture of experts for families' blocks: a router, experts, and optionally a shared expert that every token passes.

    y = Σ_j w_j expert_j(h) [ + s · shared(h) ],   h = norm(residual + x),   s = 1 or sigmoid(gate · h)

or expert_j(w_j h), if the spec says so; or out · Σ_j w_j expert_j(in · h) with experts of a latent. It has the interface of
blocks.GatedMLP. Modules have the checkpoint's names, which the family passes. The ranks' partial sums are added once, at the
end. `MoEBlock` is Llama's block with mixtures.
"""

from collections.abc import Callable

import torch

from quire.workers.layers import ops
from quire.workers.layers.experts import Experts, Router
from quire.workers.layers.linear import Linear, Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import Norm, make_norm
from quire.workers.layers.stacked_experts import Names
from quire.workers.models.blocks import GatedMLP, SelfAttention
from quire.workers.models.config import ExpertsSpec, LayerSpec, ModelConfig
from quire.workers.models.fused import RowsByName, pair
from quire.workers.models.step_context import StepContext
from quire.workers.shard import Shard, whole


class SharedExpert(Module):
    """down(silu(gate(h)) · up(h)) of this rank's shard, not yet summed over the ranks; h is the norm's output.

    Without a gate: down(max(up(h), 0)²). gate_up: how the checkpoint stores the two.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        place: Placement,
        *,
        has_gate: bool = True,
        has_bias: bool = False,
        gate_up: Callable[[Shard], RowsByName] = pair,
    ):
        super().__init__()
        hidden, inner = whole(hidden_size), place.parallel.split(intermediate_size)
        self.gate_up_proj = Linear(hidden, gate_up(inner) if has_gate else {"up_proj": inner}, has_bias, place)
        self.down_proj = Linear(inner, {"down_proj": hidden}, has_bias, place, is_partial=True)
        self._has_gate = has_gate

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if not self._has_gate:
            return self.down_proj(ops.activate(self.gate_up_proj(h), "relu2"))
        return self.down_proj(self.gate_up_proj.gated(h))


class MoE(Module):
    """name: the mixture's name in a block and the checkpoint. Its children are router, experts, and `shared`, if given; with
    experts of a latent also the projections to it and from it.

    With `shared_gate`, the name of a product, the shared expert is weighed by the sigmoid of that product of h.
    """

    _router: Router
    _shared: SharedExpert | None
    _shared_gate: Linear | None

    def __init__(
        self,
        spec: ExpertsSpec,
        hidden_size: int,
        place: Placement,
        *,
        name: str = "mlp",
        router: str = "gate",
        names: Names = Names(),  # noqa: B008 - immutable
        has_bias: bool = False,
        correction: str | None = None,
        shared: str | None = None,
        shared_gate: str | None = None,
    ):
        super().__init__()
        self._parallel, place = place.parallel, place.at(name)
        self._weighs_input = spec.weighs_input
        own, inner = place.parallel.experts(spec.routing.num_experts), place.parallel.of_each_expert(spec.intermediate_size)
        self.add_module(router, Router(router, spec.routing, hidden_size, place, has_bias=has_bias, correction=correction))
        latent, hidden = whole(spec.latent_size or hidden_size), whole(hidden_size)
        if spec.latent_size:
            self.fc1_latent_proj = Linear(hidden, {"fc1_latent_proj": latent}, spec.has_bias, place)
            self.fc2_latent_proj = Linear(latent, {"fc2_latent_proj": hidden}, spec.has_bias, place, is_partial=True)
        self._has_latent = spec.latent_size > 0
        self.experts = Experts(own, latent.full, inner, place.at("experts"), act=spec.act, names=names, has_bias=has_bias)
        self.experts.takes_pairs = spec.weighs_input and spec.routing.top_k > 1
        if spec.shared_size and shared:
            at, has_gate = place.at(shared), bool(names.gate)
            made = SharedExpert(hidden_size, spec.shared_size, at, has_gate=has_gate, has_bias=spec.has_bias)
            self.add_module(shared, made)
            if shared_gate:
                self.add_module(shared_gate, Linear(whole(hidden_size), {shared_gate: whole(1)}, False, place.of_router()))
        # not by nn.Module's __setattr__: there they are children under the checkpoint's names
        children = self._modules.get(router), self._modules.get(shared or ""), self._modules.get(shared_gate or "")
        self.__dict__.update(zip(("_router", "_shared", "_shared_gate"), children, strict=True))

    def forward(self, x: torch.Tensor | None, residual: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        return self.of(norm(residual) if x is None else norm.add(x, residual)), residual

    def of(self, h: torch.Tensor, shared: torch.Tensor | None = None) -> torch.Tensor:
        """The output for normed h [T, H]. shared: this rank's part of what a shared expert of the block's own gives."""
        if self._shared is not None:
            shared = self._shared(h)
            if self._shared_gate is not None:
                shared = ops.times_sigmoid(shared, self._shared_gate(h))
        ids, weights = self._router(h)
        if self._has_latent:
            out = self.fc2_latent_proj(self.experts(self.fc1_latent_proj(h), ids, weights))  # of this rank's part of the sum
            return self._parallel.all_reduce(out if shared is None else out.add_(shared))
        routed = self._of_weighted if self._weighs_input else self.experts
        return self._parallel.all_reduce(routed(h, ids, weights, shared))

    def _of_weighted(
        self, h: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None
    ) -> torch.Tensor:
        """Σ_j expert_j(w_j h), w_j rounded to h's dtype: each (token, expert) pair is a row of its own with weight 1."""
        pairs = (h[:, None] * weights.to(h.dtype)[:, :, None]).flatten(0, 1)
        one, top_k = torch.ones_like(weights).view(-1, 1), ids.shape[1]
        if top_k == 1:
            return self.experts(pairs, ids, one, shared)
        out = self.experts(pairs, ids.view(-1, 1), one).unflatten(0, (-1, top_k)).float().sum(1)
        return (out if shared is None else out + shared).to(h.dtype)


class MoEBlock(Module):
    """x += attention(norm(x)); x += mlp(norm(x)). The MLP is a mixture of experts if the layer's spec has them.

    o_bias: attention's output projection has a bias if q, k and v have one. correction, shared, shared_gate, names: see
    MoE.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: LayerSpec,
        place: Placement,
        layer: int,
        *,
        o_bias: bool = False,
        correction: str | None = None,
        shared: str | None = None,
        shared_gate: str | None = None,
        names: Names = Names(),  # noqa: B008 - immutable
    ):
        super().__init__()
        hidden_size, norm = config.hidden_size, (config.model.norm, config.hidden_size, place.dtype, place.device)
        bias = spec.attention_bias
        self.input_layernorm = make_norm(*norm)
        self.self_attn = SelfAttention(spec.attention, hidden_size, place, layer, qkv_bias=bias, o_bias=o_bias and bias)
        self.post_attention_layernorm = make_norm(*norm)
        self.mlp = (
            GatedMLP(hidden_size, spec.intermediate_size, place)
            if spec.experts is None
            else MoE(
                spec.experts, hidden_size, place, names=names, correction=correction, shared=shared, shared_gate=shared_gate
            )
        )

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.self_attn(x, residual, self.input_layernorm, context, logits_indices)
        return self.mlp(x, residual, self.post_attention_layernorm)
