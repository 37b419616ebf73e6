"""Tower: the modules of a model that make embeddings of items, transformers' own, with our linear layers, norms and attention.

The rest of transformers' model, its language model, is left out before anything is allocated. Items are packed: attention sees
the patches of all items in one tensor, with the bounds between them (kernels/attention/varlen). Tensors that depend on the
sizes of the items alone (positions, bounds, weights of interpolation) are computed on the host, since transformers would read
these sizes from the device. Tensors have the checkpoint's names behind `tower.`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModel
from transformers.initialization import no_init_weights
from transformers.modeling_utils import AttentionInterface
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from quire.ipc.memory_plan import MOST_GRAPH_PATCHES
from quire.kernels.attention.varlen_cpu import varlen_attention as attend_on_cpu
from quire.kernels.attention.varlen_reference import row_spans
from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.models.config import ModelConfigError
from quire.workers.models.media.patch_products import use_products
from quire.workers.models.media.spec import MediaSpec
from quire.workers.models.media.tower_graphs import Capture, TowerGraphs
from quire.workers.models.transformers.gemma_images import OF_PATCHES, largest_patches
from quire.workers.models.transformers.recorder import LinearCall, Recording
from quire.workers.models.transformers.replace import replace_layers
from quire.workers.models.transformers.skeleton import one_line, parameters_on_meta, read_config
from quire.workers.parallel import Parallel

ATTENTION = "quire_packed_flash"  # transformers passes all items in one call only if "flash" is part of the name
_READ = frozenset(("input_proj", "patch_dense", "embedding_projection"))  # Gemma 4 reads the dtypes of their weights: they stay
_BOUNDS = ("cu_seqlens", "cu_window_seqlens")
_TAKE_THE_SAME = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query, key, value [B, heads, T, D] -> [B, T, heads, D]. With bounds cu_seq_lens_q int32 [n + 1] B is 1, and tokens of
    different parts do not see each other. It may be their `row_spans` instead, int32 [2, T]."""
    batch, heads, tokens, head_dim = query.shape
    q, k, v = (x.transpose(1, 2).reshape(batch * tokens, -1, head_dim) for x in (query, key, value))
    scale = head_dim**-0.5 if scaling is None else scaling
    bounds = cu_seq_lens_q
    if bounds is None:
        bounds = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * tokens
    if not q.is_cuda:
        out = attend_on_cpu(q, k, v, bounds.tolist(), scale=scale)
    else:
        from quire.kernels.attention.varlen import varlen_attention  # imports Triton, which a CPU may not have

        firsts, ends = bounds.unbind(0) if bounds.dim() == 2 else row_spans(bounds, len(q))
        out = varlen_attention(q, k, v, firsts, ends, scale=scale)
    return out.view(batch, tokens, heads, head_dim), None


class Tower(Module):
    """A model's encoder. rows [n, width]: an embedding, and behind it what is added after the first layers (DeepStack)."""

    def __init__(self, spec: MediaSpec, place: Placement):
        super().__init__()
        AttentionInterface.register(ATTENTION, attention)
        place = place._replace(parallel=Parallel(device=place.device), quantization=None)  # each rank has all of it
        config = _with_one_layer(read_config(json.loads(spec.config)))
        try:
            with no_init_weights(), parameters_on_meta(), torch.inference_mode(False):
                model = AutoModel.from_config(config, dtype=place.dtype, attn_implementation="eager")
        except Exception as error:  # whatever a constructor raises is about config.json
            raise ModelConfigError(f"transformers cannot build the encoder of config.json: {one_line(error)}") from None
        for name, _ in list(model.named_children()):
            if name not in spec.modules:
                setattr(model, name, nn.Module())
        for module in model.modules():
            if (own := getattr(module, "config", None)) is not None:
                own._attn_implementation_internal = ATTENTION
        model.train(False).requires_grad_(False)
        replace_layers(model, _recording(model), place)
        use_products(model)
        for module in model.modules():
            if type(module) is nn.Conv3d and module.kernel_size == module.stride:
                module.__class__ = _PatchProduct
        self.__dict__["_model"] = model  # transformers' root: its children are ours, under the checkpoint's names
        for name in spec.modules:
            self.add_module(name, model.get_submodule(name))
        self._rows_of = OF_PATCHES.get(config.model_type)
        self.takes_one = self._rows_of is not None  # item a run
        vision: Any = config.vision_config
        self._unit = vision.patch_size * getattr(config, "spatial_merge_size", 1) if not hasattr(self, "visual") else 1
        visual = getattr(model, "visual", None)
        self.num_added = len(getattr(visual, "deepstack_visual_indexes", ()))  # layers after which rows are added
        self.dtype = place.dtype

    def forward(self, tensors: dict[str, torch.Tensor], sizes: dict[str, torch.Tensor]) -> torch.Tensor:
        """The rows of all items, [tokens, width]. tensors: arguments of `get_image_features` on the device; sizes: integers, on
        the host."""
        model = self.__dict__["_model"]
        if self._rows_of is not None:
            return self._rows_of(model, tensors["pixel_values"], _on(self.device, sizes["image_position_ids"]))
        if not hasattr(self, "visual"):
            # a lone image runs twice if it has one row, which Mistral's projector would take for a batch
            alone = "image_sizes" in sizes and int((sizes["image_sizes"] // self._unit).prod(1).sum()) == 1
            given = {name: x.repeat_interleave(2, 0) if alone else x for name, x in (tensors | sizes).items()}
            rows = model.get_image_features(**given, return_dict=True).pooler_output
            rows = (torch.cat(list(rows)) if isinstance(rows, list | tuple) else rows).flatten(0, -2)
            return rows[: len(rows) // 2] if alone else rows
        pixels, given = tensors["pixel_values"], self._of_sizes(sizes["image_grid_thw"])
        if (graphs := self.graphs) is not None and (rows := graphs(pixels, given)) is not None:
            return rows
        return self._encoded(pixels, {name: _on(self.device, value) for name, value in given.items()})

    def _encoded(self, pixels: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
        """The rows of items with these arguments, on the device; nothing waits for it."""
        if pixels.is_cuda and not self._embeds_by_grid:  # once a run, rather than in each layer
            spans = {name: torch.stack(row_spans(given[name], len(pixels))) for name in _BOUNDS if name in given}
            given = {**given, **spans}
        visual: Any = self.visual
        found = visual(pixels, return_dict=True, **given)
        return torch.cat([found.pooler_output, *(getattr(found, "deepstack_features", None) or ())], -1)

    @property
    def _embeds_by_grid(self) -> bool:
        """Whether the encoder computes on from the items' grids and bounds, as GLM's."""
        return hasattr(self.visual, "embeddings")

    @property
    def graphs(self) -> TowerGraphs | None:
        return self.__dict__.get("_graphs")

    def capture(self, num_tokens: int, how: Capture) -> None:
        """Capture graphs for runs of up to so many tokens, if the encoder's runs can be captured. how: `capture.captured`."""
        if not hasattr(self, "visual") or self._embeds_by_grid:
            return
        pixels, _ = self.largest(1)
        sizes = {"unit": len(pixels["pixel_values"]), "width": pixels["pixel_values"].shape[1]}
        most = min(num_tokens * sizes["unit"], MOST_GRAPH_PATCHES)
        graphs = TowerGraphs(self._encoded, how, most=most, **sizes, dtype=self.dtype, device=self.device)
        graphs.capture_all(lambda patches: self._of_sizes(self.largest(patches // sizes["unit"])[1]["image_grid_thw"]))
        self.__dict__["_graphs"] = graphs

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def _of_sizes(self, grid: torch.Tensor) -> dict[str, Any]:
        """Arguments that transformers would compute from the items' grids int64 [n, 3], with a wait for the device; on the
        host."""
        visual: Any = self.visual
        merge = visual.spatial_merge_size
        bounds = get_vision_cu_seqlens(grid)
        found: dict[str, Any] = {"grid_thw": grid, "cu_seqlens": bounds, "position_ids": get_vision_position_ids(grid, merge)}
        found["max_seqlen"] = _longest(bounds)
        if hasattr(visual, "window_size"):
            index, windows = get_vision_window_index(grid, merge, visual.window_size, visual.patch_size)
            found |= {"window_index": index, "cu_window_seqlens": windows, "max_window_seqlen": _longest(windows)}
        if hasattr(visual, "num_grid_per_side"):
            how = {"mode": visual.interpolation_mode, "align_corners": visual.interpolation_align_corners}
            taps = get_vision_interpolation_indices_and_weights(
                grid, num_grid_per_side=visual.num_grid_per_side, spatial_merge_size=merge, **how
            )
            found |= dict(zip(("interp_indices", "interp_weights"), taps, strict=True))
        return found

    def with_frames(self, pixels: torch.Tensor) -> torch.Tensor:
        """Flat patches [n, channels x frames x height x width] of ones that hold a still image's frame once."""
        vision: Any = getattr(getattr(self, "visual", None), "config", None)
        frames, channels = getattr(vision, "temporal_patch_size", 1), getattr(vision, "in_channels", 3)
        if frames == 1 or pixels.dim() != 2 or pixels.shape[1] != channels * vision.patch_size**2:
            return pixels
        frame = pixels.view(len(pixels), channels, 1, -1)
        return frame.expand(-1, -1, frames, -1).reshape(len(pixels), -1)

    def largest(self, num_tokens: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Arguments of `forward` for an image of so many tokens, without its values."""
        if not hasattr(self, "visual"):
            return self._largest_square(num_tokens)
        visual: Any = self.visual
        vision: Any = visual.config
        merge, channels = visual.spatial_merge_size, getattr(vision, "in_channels", 3)
        width = channels * vision.temporal_patch_size * vision.patch_size**2
        pixels = torch.zeros(num_tokens * merge**2, width, dtype=torch.uint8, device="cpu")
        return {"pixel_values": pixels}, {"image_grid_thw": torch.tensor([[1, merge, merge * num_tokens]], device="cpu")}

    def _largest_square(self, num_tokens: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The same for encoders that take images as they are."""
        config: Any = self.__dict__["_model"].config
        if self._rows_of is not None:
            pixels, positions = largest_patches(config, num_tokens)
            return {"pixel_values": pixels}, {"image_position_ids": positions}
        vision = config.vision_config
        size, patch = vision.image_size, vision.patch_size
        if config.model_type == "gemma3":  # images of one size, too
            images = max(num_tokens // config.mm_tokens_per_image, 1)
            return {"pixel_values": torch.zeros(images, 3, size, size, dtype=torch.uint8, device="cpu")}, {}
        if isinstance(size, list | tuple):  # tiles of one size
            tiles = max(num_tokens // config.image_seq_length, 1)
            return {"pixel_values": torch.zeros(tiles, 3, *size, dtype=torch.uint8, device="cpu")}, {}
        unit = patch * config.spatial_merge_size
        side = max(int(num_tokens**0.5), 1) * unit
        pixels = torch.zeros(1, 3, side, side, dtype=torch.uint8, device="cpu")
        return {"pixel_values": pixels}, {"image_sizes": torch.tensor([[side, side]], device="cpu")}


class _PatchProduct(nn.Conv3d):
    """A convolution over single patches: one product, where cuDNN's convolution would take far longer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if tuple(x.shape[2:]) != tuple(self.kernel_size):
            return super().forward(x)
        y = nn.functional.linear(x.flatten(1), self.weight.flatten(1), self.bias)
        return y.view(*y.shape, 1, 1, 1)


def _with_one_layer(config: Any) -> Any:
    """The config with one layer of text, as those are made and left out."""
    text = config.get_text_config(decoder=True)
    if text is not config:
        text.num_hidden_layers = 1
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:1]
        if getattr(text, "num_kv_shared_layers", 0):
            text.num_kv_shared_layers = 0
    return config


def _on(device: torch.device, value: Any) -> Any:
    """A tensor of the host on the device; the copy does not wait."""
    if device.type == "cpu" or not isinstance(value, torch.Tensor):
        return value
    return value.pin_memory().to(device, non_blocking=True)


def _longest(bounds: torch.Tensor) -> int:
    return int((bounds[1:] - bounds[:-1]).max())


def _recording(model: Any) -> Recording:
    """All linear layers, as if they had been called: siblings that are known to take one tensor have one number."""
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear and name.split(".")[-1] not in _READ]
    return Recording((), "", {}, tuple(_numbered(linears)), (), 0, 0, 0, None, ())


def _numbered(names: Sequence[str]) -> Iterator[LinearCall]:
    numbers: dict[tuple[str, Any], int] = {}
    for name in names:
        parent, _, own = name.rpartition(".")
        group = next((group for group in _TAKE_THE_SAME if own in group), own)
        yield LinearCall(name, numbers.setdefault((parent, group), len(numbers)))
