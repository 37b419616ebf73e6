"""TransformersLM: a causal language model of transformers as a LanguageModel, with our layers where they are recognized.

The body (the modules between token ids and the head's input) runs over the step's tokens as one sequence [1, T] with their
positions; attention separates the sequences (attention.py). For logits the causal model runs unchanged, with a stand-in for its
body, since it may scale, cap or bias its logits. build.py makes it, always for a whole model: it refuses several ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from quire.workers.layers.kv_scales import KVScales
from quire.workers.layers.linear import Placement
from quire.workers.models.config import ModelConfig
from quire.workers.models.language_model import Fit, LanguageModel
from quire.workers.models.step_context import StepContext
from quire.workers.models.transformers.attention import LayerAttention, Step
from quire.workers.models.transformers.checkpoint import Names
from quire.workers.models.transformers.counting import counted
from quire.workers.models.transformers.interface import ATTENTION
from quire.workers.models.transformers.read import recorded
from quire.workers.models.transformers.recorder import IDS, POSITIONS, AttentionCall
from quire.workers.models.transformers.replace import Replacement, replace_layers
from quire.workers.models.transformers.rotary import unrotated
from quire.workers.models.transformers.skeleton import build_skeleton


class TransformersLM(LanguageModel):
    """The model of a config with `transformers_config`."""

    def __init__(self, config: ModelConfig, place: Placement):
        super().__init__()
        assert config.transformers_config is not None
        self.config, self._dtype = config, place.dtype
        model = build_skeleton(config.transformers_config, place.dtype)
        recording = recorded(config.transformers_config)
        self._names = Names(model, set(model.state_dict()))
        self._replacement: Replacement = replace_layers(model, recording, place)
        self._counting = recording.counting
        self._first, self._rotations, self._step = recording.first_position, recording.rotations, Step()
        self._kv_scales: dict[int, KVScales] = {}
        for layer, call in enumerate(recording.attention):
            self._place_attention(model.get_submodule(call.module), layer, call)
        self.body = model.get_submodule(recording.body)
        self._body_name, self._arguments = recording.body, dict(recording.body_arguments)
        self._stand_in = _StandIn()
        parent, _, name = recording.body.rpartition(".")
        setattr(model.get_submodule(parent), name, self._stand_in)
        self.root = model
        self._layers = _layer_list(self.body, recording.body, recording.attention)
        ids = torch.zeros(1, 1, dtype=torch.long, device=place.device)
        self._root_arguments = {IDS: ids, POSITIONS: ids, "use_cache": False}

    def _place_attention(self, module: nn.Module, layer: int, call: AttentionCall) -> None:
        module.__dict__[ATTENTION] = LayerAttention(layer, call, self._step)
        if self.config.layers[layer].attention.cache_dtype is not None:
            self._kv_scales[layer] = module.kv_scales = KVScales()  # type: ignore[assignment]

    def forward(
        self,
        input_ids: torch.Tensor,
        context: StepContext,
        logits_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._step.attend = context.attend
        numbers = context.positions.long()[None]
        inputs = {IDS: input_ids.long()[None], POSITIONS: numbers + self._first if self._first else numbers}
        given = {name: inputs.get(value, value) if isinstance(value, str) else value for name, value in self._arguments.items()}
        counting = nullcontext() if self._counting is None else counted(self._counting, numbers[0])
        with unrotated(self._rotations), counting:
            hidden = self.body(**given)[0][0]
        return hidden if logits_indices is None else hidden.index_select(0, logits_indices)  # type: ignore[no-any-return]

    def compute_logits(self, hidden_rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        self._stand_in.hidden = hidden_rows[None]
        logits: torch.Tensor = self.root(**self._root_arguments).logits[0]
        return logits.to(self._dtype) if out is None else out.copy_(logits)

    def kv_scales(self) -> dict[int, KVScales]:
        return self._kv_scales

    @contextmanager
    def short(self) -> Iterator[None]:
        """A context in which forward runs two layers of each kind, if layers are one list; else all layers."""
        if self._layers is None:
            yield
            return
        parent, name, layers = self._layers
        specs = self.config.layers
        kinds = [(spec.attention, _shapes(layer)) for spec, layer in zip(specs, layers, strict=True)]
        setattr(parent, name, nn.ModuleList(layers[i] for i, kind in enumerate(kinds) if kinds[:i].count(kind) < 2))
        try:
            yield
        finally:
            setattr(parent, name, layers)

    def converted(self, fit: Fit) -> Fit:
        ours = Fit(
            fit.tensors,
            {self._in_transformers(name): loader for name, loader in fit.loaders.items()},
            {self._in_transformers(name): owner for name, owner in fit.owners.items()},
        )
        return self._names.converted(ours, self._replacement.tied, self._replacement.transposed)

    def adapters_name(self, name: str) -> str:
        return self._in_transformers(name)

    def _in_transformers(self, name: str) -> str:
        """transformers' name of a tensor or a module, from its name here."""
        of, _, rest = name.partition(".")
        return rest if of == "root" else f"{self._body_name}.{rest}"


class _StandIn(nn.Module):
    """Replaces the body while logits are computed: returns the hidden states computed before."""

    hidden: torch.Tensor

    def forward(self, *args: object, **kwargs: object) -> "_Output":
        return _Output(self.hidden)


class _Output:
    """A body's output; everything but the last hidden state is None."""

    def __init__(self, hidden: torch.Tensor):
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def _layer_list(
    body: nn.Module, body_name: str, calls: tuple[AttentionCall, ...]
) -> tuple[nn.Module, str, nn.ModuleList] | None:
    """(parent, name, list) of the layers, if they are the items of one list in the order of their calls."""
    for name, module in body.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == len(calls):
            prefixes = [f"{body_name}.{name}.{i}." for i in range(len(calls))]
            if all(call.module.startswith(prefix) for call, prefix in zip(calls, prefixes, strict=True)):
                parent, _, own = name.rpartition(".")
                return body.get_submodule(parent), own, module
    return None


def _shapes(layer: nn.Module) -> list[tuple[str, torch.Size]]:
    return [(name, parameter.shape) for name, parameter in layer.named_parameters()]
