"""Quantized weights in a GPU's formats, on a CPU: models built with them, and the values that their layers represent."""

from quire.kernels.linear.int4_weight import unpack
from quire.workers.layers import linear
from quire.workers.layers.formats import chosen_format, int4, scaled
from quire.workers.layers.formats.dense import Dense
from quire.workers.layers.linear import Linear


def keep_quantized(monkeypatch):
    """Formats are chosen as on a Hopper."""
    monkeypatch.setattr(linear, "choose_format", lambda place: chosen_format.quantized_format)
    monkeypatch.setattr(chosen_format, "capability_of", lambda device: (9, 0))


def linears(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, Linear) and name != "lm_head"}


def values(layer):
    if isinstance(layer.format, Dense):
        return layer.format.weight
    [(weight, _)] = layer.format.weights
    if isinstance(layer.format, int4.Int4):
        return unpack(weight)
    return weight.scaled.dequantized() if isinstance(weight, scaled.Weight) else weight.dequantized()


def in_order(layer):
    """Values, columns in the inputs' order."""
    order = None if isinstance(layer.format, Dense) else getattr(layer.format.weights[0][0], "places", None)
    return values(layer) if order is None else values(layer)[:, order.long()]
