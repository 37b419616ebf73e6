"""Rotary embedding of a transformers model, left to our attention if that computes the same.

While a model is recorded, RotaryWatch sees which cosines and sines are passed to apply_rotary_pos_emb in the model's Python
modules, and whether its results reach attention unchanged. Then both are tried on real numbers: the table against ours for each
scaling that the config may mean, the rotation in its two layouts. If all calls in a Python module agree, the function does
nothing there while our model runs (`unrotated`), and the layers' specs tell attention how to rotate.

transformers' longrope changes its factors by the longest position of a step. `still_longrope` makes it use the short ones;
attention uses the short or the long ones by the length that is served (attention/rope.py), so attention has to rotate: a model
that rotates by itself is refused (read.py).
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from quire.workers.attention.rope import cos_sin_table
from quire.workers.models.config import AttentionSpec, ModelConfigError, RopeConfig

APPLY = "apply_rotary_pos_emb"
TRIED = 600  # positions
TYPES = ("default", "linear", "llama3", "yarn", "longrope")
ASKS_BY_ITSELF = "PhimoeRotaryEmbedding"  # reads the longest position, whatever its type
OTHER_NAMES = {"rope_type": "type", "rope_theta": "theta"}


class Ropes(NamedTuple):
    of_layer: dict[str, RopeConfig]  # by the name of the attention module
    python_modules: tuple[str, ...]


class _Rotation(NamedTuple):
    """A call of apply_rotary_pos_emb."""

    python_module: str
    apply: Callable[..., Any]
    cos: torch.Tensor
    sin: torch.Tensor
    more: dict[str, Any]  # arguments besides q, k, cos, sin
    results: tuple[torch.Tensor, torch.Tensor]
    head_dim: int


class _Table(NamedTuple):
    """A call of a module that made cosines and sines."""

    module: nn.Module
    arguments: dict[str, Any]
    cos: torch.Tensor
    sin: torch.Tensor


class RotaryWatch:
    def __init__(self, model: nn.Module):
        self._modules = [m for m in model.modules() if any(name.endswith("inv_freq") for name in m._buffers)]
        names = {type(module).__module__ for module in model.modules()}
        self._python_modules = sorted(n for n in names if APPLY in vars(sys.modules[n]))
        self._rotations: list[_Rotation] = []
        self._tables: list[_Table] = []
        self._layers: dict[str, _Rotation] = {}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        kept = {name: vars(sys.modules[name])[APPLY] for name in self._python_modules}
        hooks = [module.register_forward_hook(self._made, with_kwargs=True) for module in self._modules]
        for name, apply in kept.items():
            setattr(sys.modules[name], APPLY, self._watching(name, apply))
        try:
            yield
        finally:
            for name, apply in kept.items():
                setattr(sys.modules[name], APPLY, apply)
            for hook in hooks:
                hook.remove()

    def _made(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
        if isinstance(out, tuple) and len(out) == 2 and all(isinstance(x, torch.Tensor) for x in out):
            bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            self._tables.append(_Table(module, bound, *out))

    def _watching(self, name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(apply)

        def watched(*args: Any, **kwargs: Any) -> Any:
            out = apply(*args, **kwargs)
            given = dict(signature.bind(*args, **kwargs).arguments)
            four = [given.pop(key, None) for key in ("q", "k", "cos", "sin")]
            is_pair = isinstance(out, tuple) and len(out) == 2
            if is_pair and all(isinstance(x, torch.Tensor) for x in (*four, *out)):
                self._rotations.append(_Rotation(name, apply, four[2], four[3], given, out, four[0].shape[-1]))  # type: ignore[arg-type, union-attr]
            else:
                self._python_modules = [other for other in self._python_modules if other != name]
            return out

        return watched

    def attended(self, layer: str, query: torch.Tensor, key: torch.Tensor) -> None:
        """Note that a layer's attention was called with these tensors."""
        for rotation in self._rotations:
            if rotation.results[0] is query and rotation.results[1] is key:
                self._layers[layer] = rotation

    def found(self) -> Ropes:
        """The rotations that our attention can do; to be called when buffers have their values."""
        tried: dict[tuple[int, str], RopeConfig | None] = {}
        ropes: dict[str, RopeConfig] = {}
        for layer, rotation in self._layers.items():
            at = id(rotation.cos), f"{rotation.python_module} {rotation.more} {rotation.head_dim}"
            if at not in tried:
                tried[at] = self._tried(rotation)
            if (rope := tried[at]) is not None:
                ropes[layer] = rope
        used = {id(rotation) for layer, rotation in self._layers.items() if layer in ropes}
        called = {rotation.python_module for rotation in self._rotations}
        spoilt = {rotation.python_module for rotation in self._rotations if id(rotation) not in used}
        good = tuple(name for name in self._python_modules if name in called - spoilt)
        return Ropes({layer: rope for layer, rope in ropes.items() if self._layers[layer].python_module in good}, good)

    def _tried(self, rotation: _Rotation) -> RopeConfig | None:
        table = next((t for t in self._tables if t.cos is rotation.cos and t.sin is rotation.sin), None)
        if table is None or any(isinstance(x, torch.Tensor) for x in rotation.more.values()):
            return None
        positions = torch.arange(TRIED)[None]
        real = {"position_ids": positions, "x": torch.zeros(1, TRIED, 8)}
        arguments = {name: real.get(name, value) for name, value in table.arguments.items()}
        generator = torch.Generator().manual_seed(0)
        q = torch.randn(1, 2, TRIED, rotation.head_dim, generator=generator)
        try:
            with torch.inference_mode():
                cos, sin = table.module(**arguments)
                theirs, k = rotation.apply(q, q.clone(), cos, sin, **rotation.more)
        except Exception:  # transformers' code may raise anything on unexpected input: then it rotates itself
            return None
        if not torch.equal(theirs, k) or theirs.shape != q.shape:
            return None
        for rope in _candidates(table.module, rotation.head_dim, cos.shape[-1]):
            short = msgspec.structs.replace(rope, long_factor=rope.short_factor)
            if torch.allclose(theirs, _rotated(q, short), rtol=1e-5, atol=1e-5):
                return rope
        return None


def refuse_dynamic(model: nn.Module) -> None:
    """Raise ModelConfigError by the modules' types, not by the config: Hunyuan's says dynamic, but its alpha is fixed."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if any("dynamic" in str(own) for own in (kind.values() if isinstance(kind, dict) else (kind,))):
            raise ModelConfigError(
                "its rotary embedding is dynamic: frequencies that depend on the length of the sequence are not supported"
            )


def still_longrope(model: nn.Module) -> None:
    """Make the model's longrope modules compute a constant table, with the short factors."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind == "longrope":
            module.rope_type = "default"  # type: ignore[assignment]
        elif isinstance(kind, dict):  # by type of layer
            module.rope_type = {of: "default" if own == "longrope" else own for of, own in kind.items()}  # type: ignore[assignment]
        if type(module).__name__ == ASKS_BY_ITSELF:
            module.forward = partial(_of_short, module)


def _of_short(module: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of Phi-MoE's module with the short factors, whatever the longest position."""
    scale = module.config.rope_parameters.get("short_mscale", module.attention_scaling)
    angles = position_ids[..., None].float() * module.inv_freq.float()
    angles = torch.cat((angles, angles), -1)
    return (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)


@contextlib.contextmanager
def unrotated(python_modules: tuple[str, ...]) -> Iterator[None]:
    """A context in which apply_rotary_pos_emb of these Python modules returns queries and keys unchanged."""
    modules = [sys.modules[name] for name in python_modules]
    kept = [vars(module)[APPLY] for module in modules]
    for module in modules:
        setattr(module, APPLY, _as_it_is)
    try:
        yield
    finally:
        for module, apply in zip(modules, kept, strict=True):
            setattr(module, APPLY, apply)


def _as_it_is(q: torch.Tensor, k: torch.Tensor, *others: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q, k


def _candidates(module: nn.Module, head_dim: int, columns: int) -> Iterator[RopeConfig]:
    """The rotary embeddings that a rotary module's config may mean: each of its scalings in both layouts."""
    config = getattr(module, "config", None)
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return
    for some in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        given = {name: value for name, value in some.items() if value is not None}
        fields = given | {own: given[name] for name, own in OTHER_NAMES.items() if name in given}
        if fields.get("type") not in TYPES:
            continue
        longest = getattr(config, "max_position_embeddings", None) or 0
        original = fields.setdefault("original_max_position_embeddings", longest)
        if not original and fields["type"] not in ("default", "linear"):
            continue
        if fields["type"] in ("yarn", "longrope") and "factor" not in fields and longest:
            fields["factor"] = longest / original
        if "short_mscale" in fields:
            fields["attention_factor"] = fields["short_mscale"]
        fields = {name: value for name, value in fields.items() if name in RopeConfig.__struct_fields__}
        for rotary_dim in {columns, 2 * columns}:
            if rotary_dim <= head_dim:
                for interleaved in (False, True):
                    own = {"rotary_dim": 0 if rotary_dim == head_dim else rotary_dim, "interleaved": interleaved}
                    with contextlib.suppress(msgspec.ValidationError):
                        rope = msgspec.convert({**fields, **own}, RopeConfig, strict=False)
                        if rope.type != "longrope" or {len(rope.short_factor), len(rope.long_factor)} == {rotary_dim // 2}:
                            yield rope


def _rotated(x: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """x [1, heads, T, D], rotated as attention does for positions 0 to T - 1."""
    spec = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=x.shape[-1], scale=1.0, window=0, rope=rope)
    cos, sin = cos_sin_table(spec, x.shape[2]).chunk(2, -1)
    turned, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    if rope.interleaved:
        x1, x2 = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).flatten(-2)
    else:
        x1, x2 = turned.chunk(2, -1)
        turned = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)
    return torch.cat((turned, rest), -1)
