"""The layers of a model that adapters may change: makes their adapter slots, and finds those that an adapter's tensors name.

Slots hold the layers that the limits name: linear layers of blocks, or those among them that `target_modules` names; the head,
the embedding, routers and experts only if the limits say so. Names are the checkpoint's, or those of transformers' modules.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from quire.ipc.adapters import AdapterError, AdapterLimits, AdapterPart
from quire.kernels.lora.tables import LoraWeights
from quire.workers.adapters.experts import LoraExperts
from quire.workers.adapters.lora import LoraLayer, Piece, StepAdapters
from quire.workers.layers.embedding import Embedding
from quire.workers.layers.experts import Experts, Router
from quire.workers.layers.formats.format import checkpoint_prefix
from quire.workers.layers.linear import Linear
from quire.workers.models.language_model import LanguageModel
from quire.workers.models.stage_boundary import MissingLayer
from quire.workers.shard import RowShard, Shard, whole

HEAD, EMBEDDING = "lm_head", "model.embed_tokens"
AT_START = "an adapter of it that is registered at the start"
# transformers' name of a module, where that is not the checkpoint's
SPELLINGS = ((".mlp.", ".block_sparse_moe."), (".self_attn.forget_gate.", ".self_attn."))


def slots_bytes(model: LanguageModel, limits: AdapterLimits, dtype: torch.dtype) -> int:
    """Bytes that all adapter slots of a model will take. The model gets slots without memory."""
    dtype = getattr(torch, limits.dtype) if limits.dtype else dtype
    places = Places(model, limits, StepAdapters(limits.max_loras), dtype, torch.device("meta"))
    return sum(weights.num_bytes for weights in places.layers)


class OneExpert(NamedTuple):
    """A layer of one expert. number: the expert's on this rank; None: it is another rank's."""

    experts: LoraExperts
    weights: LoraWeights
    piece: int
    number: int | None


class Places:
    """layers: the weights of all slots; how many of their own slots belong to an adapter slot is `per_slot`."""

    def __init__(
        self, model: LanguageModel, limits: AdapterLimits, steps: StepAdapters, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._limits, self._steps, self._dtype, self._device = limits, steps, dtype, device
        self._names = model.config.names
        self._pieces: dict[str, Piece] = {}
        self._experts: dict[str, LoraExperts] = {}  # by the name of the module
        self._not_held: dict[str, str] = {}  # layers that slots do not hold, and what would make them
        self._elsewhere = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, MissingLayer))
        self.layers: list[LoraWeights] = []
        for name, module in list(model.named_modules()):
            self._make(model.adapters_name(name), module)

    def _make(self, name: str, module: torch.nn.Module) -> None:
        if isinstance(module, Linear):
            self._make_linear(name, module)
        elif isinstance(module, Embedding) and name == EMBEDDING:
            vocab_size, hidden_size = map(whole, module.weight.shape)
            if self._may_make(name, self._limits.has_embedding):
                made = self._new(vocab_size, {name: hidden_size}, is_table=True, multiplier=module.scale)
                module.set_adapter(made, self._steps)
        elif isinstance(module, Router):
            experts, hidden_size = map(whole, module.weight.shape)
            if self._may_make(name, self._limits.has_routers):
                module.set_adapter(self._new(hidden_size, {name: experts}), self._steps)
        elif isinstance(module, Experts) and self._may_make(name, self._limits.has_experts):
            self._make_experts(name, module)

    def _may_make(self, name: str, is_held: bool) -> bool:
        """Whether a layer that only some adapters have gets slots: the limits say so, or its name is a target."""
        is_held = is_held or self._is_target(name)
        if not is_held:
            self._not_held[name] = AT_START
        return is_held

    def _is_target(self, layer: str) -> bool:
        return any(layer == target or layer.endswith(f".{target}") for target in self._limits.target_modules)

    def _make_linear(self, name: str, module: Linear) -> None:
        prefix = checkpoint_prefix(f"{name}.format")
        outputs = {f"{prefix}{layer}": rows for layer, rows in module.outputs.items()}
        if any(self._holds(layer) for layer in outputs):
            module.set_adapter(self._new(module.inputs, outputs), self._steps)
        else:
            why = AT_START if HEAD in outputs else "--lora-target-modules"
            self._not_held.update(dict.fromkeys(outputs, why))
            module.set_adapter(None, self._steps)

    def _holds(self, layer: str) -> bool:
        by_default = self._limits.has_head if layer == HEAD else not self._limits.target_modules
        return by_default or self._is_target(layer)

    def _new(
        self, inputs: Shard, outputs: Mapping[str, RowShard], *, is_table: bool = False, multiplier: float = 1.0
    ) -> LoraLayer:
        sizes = self._limits.max_rank, self._dtype, self._device
        made = LoraLayer(inputs, outputs, self._steps, *sizes, is_table=is_table, multiplier=multiplier)
        self.layers.append(made.weights)
        self._pieces |= made.pieces
        return made

    def _make_experts(self, name: str, module: Experts) -> None:
        if module.place.lacks:
            self._not_held[name] = module.place.lacks
            return
        made = LoraExperts(module.place, self._steps, self._limits.max_rank, self._dtype, self._device)
        module.set_adapter(made, self._steps)
        self.layers += [made.gate_up, made.down]
        self._experts[name] = made

    # ------------------------------------------------------------------------------------------------------------- names
    def find(self, part: AdapterPart) -> Piece | OneExpert | LoraExperts | None:
        """The place that a part changes: a layer, a layer of one expert, or all experts' parameter. None: it is another rank's.

        Raises AdapterError for a layer that the model has not, or that slots do not hold.
        """
        name = self._names.in_model(f"{part.layer}.weight").removesuffix(".weight")
        names = [name, *(name.replace(theirs, ours) for theirs, ours in SPELLINGS if theirs in name)]
        for one in names:
            if (found := self._pieces.get(one) or self._experts_of(one)) is not None:
                return found
        if f"{name}.".startswith(self._elsewhere):
            return None
        raise AdapterError(self._why_not(part, names))

    def _experts_of(self, name: str) -> OneExpert | LoraExperts | None:
        if (all_of_them := self._experts.get(name.removesuffix(".base_layer"))) is not None:
            return all_of_them
        module, _, rest = name.rpartition(".experts.")
        number, _, kind = rest.partition(".")
        experts = self._experts.get(f"{module}.experts")
        if experts is None or not number.isdecimal() or (found := experts.kind_of(kind)) is None:
            return None
        own = experts.place.own
        if int(number) >= own.full:
            return None
        return OneExpert(experts, *found, int(number) - own.start if own.start <= int(number) < own.stop else None)

    def _why_not(self, part: AdapterPart, names: list[str]) -> str:
        for name in names:
            why = self._not_held.get(name) or self._not_held.get(f"{name.rpartition('.experts')[0]}.experts")
            if why is not None:
                return f"{part.a.name}: adapter slots do not hold this layer; it needs {why}"
        if names[0].endswith("kv_b_proj"):
            return f"{part.a.name}: adapters of kv_b_proj are not supported; leave it out of target_modules"
        return f"{part.a.name}: the model has no layer of this name that an adapter may change"
