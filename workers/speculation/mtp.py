"""MTPHead: layers of the target's own checkpoint that predict a further token draft (DeepSeek V3, arXiv:2412.19437, 2.2).

    entry(t)  = fc(norm(embedding of token t) beside norm(hidden state of token t - 1)), then layers of the target's kind
    logits    = the target's head(norm(output)); the embedding is the target's, too
    the hidden state is the target's, behind its final norm or before it; a draft's own is the head's behind its last norm

An entry lies in the KV slot of the token that it embeds and depends on no later one. A sequence's first token has no hidden
state before it, so its entry is hidden from all others (the window of -1 in the layers' attention). Where a checkpoint has
layers for several further tokens, the first one drafts all of them. Families say in `read_mtp` what their checkpoints have.
"""

from pathlib import Path

import msgspec
import torch
from torch import nn

from quire.workers.layers.linear import Linear, Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import make_norm
from quire.workers.loading.files import checkpoint_tensors
from quire.workers.models.config import LayerSpec, ModelConfig, ModelConfigError, MTPSpec
from quire.workers.models.decoder import CausalLM
from quire.workers.models.family_table import FAMILIES, as_stored
from quire.workers.models.step_context import StepContext
from quire.workers.parallel import Parallel
from quire.workers.shard import whole
from quire.workers.speculation.head import Head

PLACE = "mtp."  # of the head's tensors among the checkpoint's
COPIES = ("mtp.embed_tokens.", "mtp.layers.0.embed_tokens.", "mtp.layers.0.shared_head.head.")  # of the target's


def mtp_config(target: ModelConfig, folder: str | None) -> tuple[ModelConfig, MTPSpec]:
    """The head's config, and what the target's family says of it. folder: of the checkpoint, None if it has no files.

    Raises ModelConfigError, and WeightsError for files that cannot be read.
    """
    spec = target.mtp
    if spec is None:
        raise ModelConfigError("mtp needs a model with layers that predict further tokens, and none are known of this one")
    if spec.why_not is not None:
        raise ModelConfigError(f"mtp: {spec.why_not}: not supported")
    endings = tuple(part for part in target.names.ignored if part.startswith("."))
    names = target.names._replace(prefixes=(*target.names.prefixes, *spec.prefixes), ignored=(*endings, *COPIES), only=PLACE)
    quantized = target.quantization
    if folder is not None:
        if not checkpoint_tensors(Path(folder), names):
            raise ModelConfigError("mtp: the checkpoint has no tensors of layers that predict further tokens")
        if quantized is not None and quantized.holds is not None:  # else by a flag, which counts for all layers
            quantized = as_stored(quantized, Path(folder), names)
    layers = tuple(_hiding_first(layer) for layer in spec.layers)
    return msgspec.structs.replace(
        target, layers=layers, names=names, tie_word_embeddings=False, quantization=quantized, mtp=None
    ), spec


def _hiding_first(layer: LayerSpec) -> LayerSpec:
    if not layer.attention.is_there:
        return layer
    if layer.attention.window:
        raise ModelConfigError("mtp: its layer has a sliding window: not supported")
    return msgspec.structs.replace(layer, attention=msgspec.structs.replace(layer.attention, window=-1))


class MTPLayers(Module):
    def __init__(self, config: ModelConfig, place: Placement, parallel: Parallel, dtype: torch.dtype):
        super().__init__()
        size = config.hidden_size
        norm = config.model.norm, size, dtype, parallel.device
        make_block = FAMILIES[config.architecture].make_block
        self.enorm, self.hnorm = make_norm(*norm), make_norm(*norm)
        self.fc = Linear(whole(2 * size), {"fc": whole(size)}, False, place.at("mtp").of_router())
        layers = enumerate(config.layers)
        self.layers = nn.ModuleList([make_block(config, spec, place.at(f"mtp.layers.{i}"), i) for i, spec in layers])
        self.norm = make_norm(*norm)


class MTPHead(Head):
    _target: CausalLM

    def __init__(self, config: ModelConfig, spec: MTPSpec, dtype: torch.dtype, parallel: Parallel, target: CausalLM):
        super().__init__()
        self.config, self._hidden_first = config, spec.hidden_first
        self.mtp = MTPLayers(config, Placement(dtype, parallel, config.quantization), parallel, dtype)
        self.__dict__["_target"] = target  # past nn.Module: it is loaded by itself

    def forward(
        self, input_ids: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> torch.Tensor:
        mtp, x = self.mtp, None
        both = mtp.enorm(self._target.model.embed_tokens(input_ids)), mtp.hnorm(self.given)
        residual = mtp.fc(torch.cat(both[::-1] if self._hidden_first else both, 1))
        *blocks, last = mtp.layers
        for block in blocks:
            x, residual = block(x, residual, context, None)
        x, residual = last(x, residual, context, logits_indices)
        self.given = mtp.norm.add(x, residual)
        return self.given

    def compute_logits(self, hidden_rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._target.compute_logits(hidden_rows, out)
