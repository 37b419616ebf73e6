"""How many bytes a quantized layer takes on a CPU, by the form of its values: for memory checks and `quire estimate`.

workers/layers/formats/kept_cpu.py holds layers so. The embedding and the LM head of a quantized checkpoint take two bytes a
value, and layers that the checkpoint leaves plain take the bytes of the activations' type. No torch.

    form                        bytes of a value      and for each group of inputs of an output
    uint4                       1/2                   4: scale and zero point in bfloat16
    uint8                       1                     8: those of two planes
    int8, fp8                   1                     4, shared by the outputs of a block
    nf4, fp4                    1/2                   4
    mxfp4                       1/2                   2
"""

from typing import Literal, NamedTuple

Form = Literal["uint4", "uint8", "int8", "fp8", "nf4", "fp4", "mxfp4"]
GROUPS = (256, 128, 64, 32)  # that integers' scales are stored for
BLOCK = 64  # outputs of uint4 and uint8 are padded to a multiple


class KeptForm(NamedTuple):
    """Bits of a value, and bytes for each group."""

    bits: int
    group_bytes: int


KEPT_FORMS: dict[Form, KeptForm] = {
    "uint4": KeptForm(4, 4),
    "uint8": KeptForm(8, 8),
    "int8": KeptForm(8, 4),
    "fp8": KeptForm(8, 4),
    "nf4": KeptForm(4, 4),
    "fp4": KeptForm(4, 4),
    "mxfp4": KeptForm(4, 2),
}


def kept_bytes(form: Form, outputs: int, inputs: int, block: tuple[int, int]) -> int:
    """Bytes of a weight [outputs, inputs] with a scale for each `block` of outputs and inputs; 0: all of them."""
    bits, group_bytes = KEPT_FORMS[form]
    height, width = block[0] or outputs, min(block[1] or inputs, inputs)
    groups = -(-inputs // width)
    if form in ("uint4", "uint8"):
        padded = -(-width // 32) * 32  # each group of inputs is padded
        outputs, inputs = -(-outputs // BLOCK) * BLOCK, groups * padded
        groups = inputs // next(size for size in GROUPS if padded % size == 0)
    return outputs * inputs * bits // 8 + group_bytes * groups * -(-outputs // height)
