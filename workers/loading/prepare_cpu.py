"""What a model on the CPU gets once its weights are in place: quick attributes. Formats pack weights."""

from torch import nn


def quicken_attributes(model: nn.Module) -> None:
    """Let modules find their children and parameters as plain attributes; to be called once, when the weights are in place.

    nn.Module looks in its own tables only after an ordinary lookup has failed, at some 0.4 us each: 50 us a step of a model of
    6 layers, of 1,000. An assignment later still does what it should, for nn.Module clears the plain attribute.
    """
    for module in model.modules():
        module.__dict__.update(module._modules)
        module.__dict__.update(module._parameters)
