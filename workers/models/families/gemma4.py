"""Gemma 4: sandwich norms by w in float32, x += norm(attention(norm(x))); x += norm(mlp(norm(x))). Values are normed, too, each
head without weights, and q·k is not scaled. Layers with full attention have another size and number of heads, which are partly
rotated, and may use their keys as values. The last layers may have no keys and values: they read those of the last layer of
their kind that has, and their MLP may be twice as wide. Each layer may have an input besides the residual stream,

    x += norm(W' (gelu(W x) · input of this layer)),      and x is multiplied with a scalar of the layer at the end,

and experts besides the MLP: norm(norm(mlp(..)) + norm(experts(norm(x)))), with a router that gets x normed by its own scale.
"""

from collections.abc import Iterator

import torch

from quire.kernels.experts.routing_reference import Routing
from quire.workers.layers import ops
from quire.workers.layers.experts import Experts, Router
from quire.workers.layers.linear import Linear, Placement
from quire.workers.layers.module import Module, WeightOwner, new_parameter
from quire.workers.layers.norm import make_norm
from quire.workers.layers.stacked_experts import Names
from quire.workers.loading.weight_loader import WeightLoader, copied
from quire.workers.models.blocks import GatedMLP, SelfAttention
from quire.workers.models.config import LayerSpec, ModelConfig
from quire.workers.models.decoder import Family
from quire.workers.models.families.gemma4_fields import (
    ACTIVATIONS,
    FIELDS,
    NAMES,
    plain_fields,
    read_layers,
    read_model,
    shared_tensors,
)
from quire.workers.models.fused import keys_twice, queries_alone, separate
from quire.workers.models.step_context import StepContext
from quire.workers.shard import Shard, whole


class Scalar(WeightOwner):
    """One number, a tensor under its own name in the checkpoint."""

    def __init__(self, place: Placement):
        super().__init__()
        self.weight = new_parameter((1,), place.dtype, place.device)

    def loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        yield name, copied(self.weight, (whole(1),))

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        self.weight.fill_(1.0)


class Scales(WeightOwner):
    """A router's scale of its input and of each expert's weight, under their own names in the checkpoint."""

    def __init__(self, hidden_size: int, experts: Shard, place: Placement):
        super().__init__()
        self._experts = experts
        self.scale = new_parameter((hidden_size,), place.dtype, place.device)
        self.per_expert = new_parameter((experts.size + 1,), torch.float32, place.device)  # the last: for other ranks
        self.per_expert.fill_(1.0)

    def loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        router = name.rpartition(".")[0]
        yield f"{router}.scale", copied(self.scale, (whole(len(self.scale)),))
        yield f"{router}.per_expert_scale", copied(self.per_expert[: self._experts.size], (self._experts,))

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        self.scale.fill_(1.0)


class Gemma4Router(Module):
    """Routes x [T, H] by norm(x) · scale / √H; weights are normalized and multiplied by a scale of each expert."""

    def __init__(self, routing: Routing, experts: Shard, config: ModelConfig, place: Placement):
        super().__init__()
        self._eps, self._root = config.rms_norm_eps, config.hidden_size**-0.5
        self.scales = Scales(config.hidden_size, experts, place)
        self.proj = Router("router.proj", routing, config.hidden_size, place)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and weights, as from layers.experts.Router."""
        ids, weights = self.proj(ops.rms_norm(x, self.scales.scale, self._eps).mul_(self._root))
        return ids, weights.mul_(self.scales.per_expert[ids.long()])


class Gemma4Block(Module):
    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, norm = config.hidden_size, (config.model.norm, config.hidden_size, place.dtype, place.device)
        bias, shares = spec.attention_bias, spec.attention.shares is not None
        self._layer, self._activation, self._parallel = layer, spec.activation, place.parallel
        self._has_input, self._has_experts = config.model.per_layer is not None, spec.experts is not None
        rows = queries_alone if shares else keys_twice if spec.keys_are_values else separate
        self.input_layernorm = make_norm(*norm)
        self.self_attn = SelfAttention(
            spec.attention, hidden_size, place, layer, qkv_bias=bias, o_bias=bias, qkv=rows, feeds_add_norm=False,
            v_norm_eps=None if shares else config.rms_norm_eps,
        )  # fmt: skip
        self.post_attention_layernorm = make_norm(*norm)
        self.pre_feedforward_layernorm = make_norm(*norm)
        self.mlp = GatedMLP(hidden_size, spec.intermediate_size, place, activation=spec.activation, feeds_add_norm=False)
        self.post_feedforward_layernorm = make_norm(*norm)
        self.layer_scalar = Scalar(place)
        if config.model.per_layer is not None:
            hidden, own = whole(hidden_size), whole(config.model.per_layer.size)
            self.per_layer_input_gate = Linear(hidden, {"per_layer_input_gate": own}, False, place)
            self.per_layer_projection = Linear(own, {"per_layer_projection": hidden}, False, place)
            self.post_per_layer_input_norm = make_norm(*norm)
        if (e := spec.experts) is not None:
            inner, own = place.parallel.of_each_expert(e.intermediate_size), place.parallel.experts(e.routing.num_experts)
            self.router = Gemma4Router(e.routing, own, config, place)
            self.experts = Experts(own, hidden_size, inner, place.at("experts"), act=e.act, names=Names())
            self.post_feedforward_layernorm_1 = make_norm(*norm)
            self.pre_feedforward_layernorm_2 = make_norm(*norm)
            self.post_feedforward_layernorm_2 = make_norm(*norm)

    def forward(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        context: StepContext,
        logits_indices: torch.Tensor | None = None,
        inputs: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """inputs [T, layers, P]: from PerLayerInputs."""
        x, residual = self.self_attn(x, residual, self.input_layernorm, context, logits_indices)
        x, residual = self.mlp(self.post_attention_layernorm(x), residual, self.pre_feedforward_layernorm)
        if self._has_experts:
            x = self._with_experts(x, residual)
        residual = residual.add_(self.post_feedforward_layernorm(x))
        if self._has_input:
            assert inputs is not None
            own = inputs[:, self._layer]
            residual.add_(self._of_input(residual, own if logits_indices is None else own.index_select(0, logits_indices)))
        return None, residual.mul_(self.layer_scalar.weight)

    def _with_experts(self, of_mlp: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ids, weights = self.router(x)
        out = self._parallel.all_reduce(self.experts(self.pre_feedforward_layernorm_2(x), ids, weights))
        return self.post_feedforward_layernorm_1(of_mlp).add_(self.post_feedforward_layernorm_2(out))

    def _of_input(self, x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """[R, H], from x [R, H] and the layer's inputs [R, P]."""
        h = ops.activate(self.per_layer_input_gate(x), self._activation)
        return self.post_per_layer_input_norm(self.per_layer_projection(h.mul_(own)))


FAMILY = Family(
    "gemma4",
    FIELDS,
    read_layers,
    Gemma4Block,
    read_model=read_model,
    plain_fields=plain_fields,
    names=NAMES,
    activations=frozenset(ACTIVATIONS),
    ignored=shared_tensors,
)
