"""Ways to get a model's quirk wrong, for tests that such a model is told from a right one.

A change is of the config, or of the model once its weights are loaded.
"""

import msgspec
import torch

from quire.workers.models.gated_delta_net import Convolution, HeadTensors
from quire.workers.models.kimi_delta import Decays, KimiDelta
from quire.workers.models.mamba2 import Mamba2
from quire.workers.models.short_convolution import ShortConvolution

replace = msgspec.structs.replace
INFINITY = float("inf")


def attention(**changes):
    """Of all layers; a value may be a function of the attention's spec."""

    def changed(layer):
        spec = layer.attention
        values = {key: value(spec) if callable(value) else value for key, value in changes.items()}
        return replace(layer, attention=replace(spec, **values))

    return lambda config: replace(config, layers=tuple(map(changed, config.layers)))


def layers(**changes):
    return lambda config: replace(config, layers=tuple(replace(layer, **changes) for layer in config.layers))


def around(**changes):
    """Of the model's spec."""
    return lambda config: replace(config, model=replace(config.model, **changes))


def norms(**changes):
    return lambda config: replace(config, model=replace(config.model, norm=replace(config.model.norm, **changes)))


def without_decay(model):
    for module in model.modules():
        if isinstance(module, HeadTensors | Decays):
            module.A_log.fill_(-20.0)


def without_first_tap(model):
    for module in model.modules():
        if isinstance(module, Convolution):
            module.weight[0] = 0.0


def mamba(**changes):
    """Of all Mamba layers."""

    def changed(layer):
        return replace(layer, recurrent=layer.recurrent and replace(layer.recurrent, **changes))

    return lambda config: replace(config, layers=tuple(map(changed, config.layers)))


def factors(**changes):
    """Of Falcon-H1's layers."""

    def changed(layer):
        return replace(layer, multipliers=replace(layer.multipliers, **changes))

    return lambda config: replace(config, layers=tuple(map(changed, config.layers)))


def zeros(end):
    """Parameters whose names end so, as if they were not there."""

    def change(model):
        found = [p for name, p in model.named_parameters() if name.endswith(end)]
        assert found
        for parameter in found:
            parameter.zero_()

    return change


def without_norms(model):
    """Those behind the recurrence."""
    for module in model.modules():
        if isinstance(module, Mamba2):
            module.norm = None


def decay_of_heads(model):
    """All channels of a head decay as its first one."""
    for module in model.modules():
        if isinstance(module, KimiDelta):
            heads, form = len(module.decays.A_log), module.f_b_proj.format
            bias, weight = (p.detach().unflatten(0, (heads, -1)) for p in (module.decays.dt_bias, form.weight))
            module.decays.dt_bias.copy_(bias[:, :1].expand_as(bias).flatten())
            form.weight = torch.nn.Parameter(weight[:, :1].expand_as(weight).flatten(0, 1).contiguous(), requires_grad=False)
            form.finish()


def constant_gate(model):
    """The output's gate is 1/2, whatever the token."""
    for module in model.modules():
        if isinstance(module, KimiDelta):
            form = module.g_b_proj.format
            form.weight = torch.nn.Parameter(torch.zeros_like(form.weight), requires_grad=False)
            form.finish()


class Ungated(torch.nn.Module):
    """A gated convolution without one of its gates."""

    def __init__(self, inner, gate):
        super().__init__()
        self.inner, self.gate = inner, gate

    def forward(self, x, tails, rows, gates):
        return self.inner(x, tails, rows, gates._replace(**{self.gate: torch.ones_like(x)}))


def ungated(gate):
    def change(model):
        for module in model.modules():
            if isinstance(module, ShortConvolution):
                module.conv = Ungated(module.conv, gate)

    return change


def rope(**changes):
    return attention(rope=lambda spec: spec.rope and replace(spec.rope, **changes))


def alibi(**changes):
    return attention(alibi=lambda spec: replace(spec.alibi, **changes))


def window(by):
    return attention(window=lambda spec: spec.window and spec.window + by)


def swapped_bases(config):
    """Each kind of layer has the other's rotary table."""
    ropes = {layer.attention.window > 0: layer.attention.rope for layer in config.layers}
    return attention(rope=lambda spec: ropes[spec.window == 0])(config)


def rotates_everywhere(config):
    rope = next(layer.attention.rope for layer in config.layers if layer.attention.rope is not None)
    return attention(rope=rope)(config)


def without(*names):
    """A fault in the model: these attributes, set to what turns them off, wherever a module has them."""

    def change(model):
        for module in model.modules():
            for name, value in names:
                if hasattr(module, name):
                    module.__dict__[name] = value

    return change


def ones(*ends):
    """Parameters of these names' ends, as if they had been forgotten."""

    def change(model):
        found = [p for name, p in model.named_parameters() if name.endswith(ends)]
        assert found
        for parameter in found:
            parameter.fill_(0.0 if ends[0].endswith("bias") else 1.0)

    return change


def reordered(name, rows_of):
    """Rows of each layer of this name in another order, as if the checkpoint's had been taken for another one."""

    def change(model):
        for module in model.modules():
            if (layer := getattr(module, "_modules", {}).get(name)) is not None:
                rows = rows_of(model.config.layers[0].attention, len(layer.format.weight))
                layer.format.weight = torch.nn.Parameter(layer.format.weight[rows].contiguous(), requires_grad=False)
                if layer.format.bias is not None:
                    layer.format.bias.copy_(layer.format.bias[rows])
                layer.format.finish()

    return change


def group_by_group(spec, count):
    """Of q|k|v, where each group's queries lie before its key and value."""
    group = spec.num_heads // spec.num_kv_heads
    heads = [h for g in range(spec.num_kv_heads) for h in (*range(g * group, (g + 1) * group), -1, -2)]
    k, v = spec.num_heads, spec.num_heads + spec.num_kv_heads
    found = [h if h >= 0 else (k if h == -1 else v) + i // (group + 2) for i, h in enumerate(heads)]
    return torch.arange(count).view(-1, spec.head_dim)[found].flatten()


def halves_swapped(spec, count):
    return torch.arange(count).roll(count // 2)
