"""A 4-bit weight as the kernels of `int4` read it, made once at load from the unpacked form of every checkpoint format.

    W[n, k] = (q[n, k] - z[n, k // g]) * s[n, k // g]         q 0 to 15, z 0 to 16, group g of K

Words of 32 bits hold 8 weights of a row. K is in chunks of 128 (zeros behind its end), 16 words each; word j of a chunk has at
bit 4 t + 16 h, with t in 0..3 and h in 0, 1, the weight of

    k = 32 t + 2 j + h        of the chunk

so that `(word >> 4 t) & 0x000F000F` is a pair of adjacent weights, in the halves where a pair of 16-bit numbers has them: with
the bits of 128 in bfloat16 (0x4300, or of 1024 in float16) set above, it *is* the pair 128 + q, without a conversion. All
weights of one t lie in one stretch of 32, so groups of 32, 64 and multiples of 128 change between stretches; x keeps its order.
"""

from typing import NamedTuple

import torch

BLOCK = 128  # of K, a chunk
BLOCK_WORDS = BLOCK // 8
SYMMETRIC_ZERO = 8
GROUPS = "32, 64, a multiple of 128, or all of K"


class Int4Weight(NamedTuple):
    """words int32 [N, Kp / 8], Kp = K rounded up to a multiple of 128; scales [G, N]; zeros uint8 [G, N], None if all are 8.

    A tile of W reads a group's scales for its rows at once: side by side, they are one sector of memory, not one a row.
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group: int  # along K; at least Kp if there is one group
    inputs: int  # K
    perm: torch.Tensor | None = None  # int32 [K]: column i of W is for x[:, perm[i]]
    places: torch.Tensor | None = None  # int32 [K], perm's inverse: where a norm before it writes its column c

    @property
    def outputs(self) -> int:
        return self.words.shape[0]


def supports(group: int, inputs: int) -> bool:
    """Whether the kernels support groups of this size; a group of -1 or of K and more is all of K."""
    return inputs % 2 == 0 and (group in (32, 64) or group % BLOCK == 0 or not 0 < group < inputs)


def pack(
    q: torch.Tensor, zeros: torch.Tensor | None, scales: torch.Tensor, group: int, perm: torch.Tensor | None = None
) -> Int4Weight:
    """Pack q uint8 [N, K] (0 to 15), zeros [N, G] (None: 8) and scales [N, G]; G = ceil(K / group). Any device.

    Raises ValueError for groups that the kernels do not support.
    """
    outputs, inputs = q.shape
    if not supports(group, inputs):
        raise ValueError(f"int4: groups of {group} of {inputs} inputs are not computed: take {GROUPS}, of an even number")
    padded = -(-inputs // BLOCK) * BLOCK
    group = padded if not 0 < group < inputs else group
    groups = -(-padded // group)
    given = -(-inputs // group)
    if scales.shape != (outputs, given) or (zeros is not None and zeros.shape != scales.shape):
        raise ValueError(f"int4: scales {tuple(scales.shape)} do not fit {given} groups of {outputs} outputs")
    columns = q.new_zeros(outputs, padded)
    columns[:, :inputs] = q
    # [N, block, t, j, h] -> [N, block, j, h, t]: eight to a word, low bits first
    nibbles = columns.view(outputs, -1, 4, BLOCK_WORDS, 2).permute(0, 1, 3, 4, 2).reshape(outputs, padded // 8, 8)
    words = (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).contiguous().view(torch.int32).view(outputs, padded // 8)
    if groups > given:  # groups of padding only
        scales = torch.cat((scales, scales.new_zeros(outputs, groups - given)), 1)
        zeros = None if zeros is None else torch.cat((zeros, zeros.new_zeros(outputs, groups - given)), 1)
    zeros = None if zeros is None else zeros.t().to(torch.uint8).contiguous()
    weight = Int4Weight(words, scales.t().contiguous(), zeros, group, inputs)
    return weight if perm is None else weight._replace(perm=perm.to(torch.int32), places=perm.argsort().to(torch.int32))


def stacked(weights: list[Int4Weight]) -> Int4Weight:
    """The outputs of several weights concatenated, all of one group, inputs and order: scales take the widest dtype."""
    first, *_ = weights
    if len(weights) == 1:
        return first
    if any((w.group, w.inputs) != (first.group, first.inputs) for w in weights):
        raise ValueError("int4: weights of several groups or inputs are not stacked")
    zeros = None
    if any(w.zeros is not None for w in weights):
        given = [torch.full_like(w.scales, SYMMETRIC_ZERO, dtype=torch.uint8) if w.zeros is None else w.zeros for w in weights]
        zeros = torch.cat(given, 1)
    words, scales = torch.cat([w.words for w in weights]), torch.cat([w.scales for w in weights], 1)
    return first._replace(words=words, scales=scales, zeros=zeros)


def unpack(weight: Int4Weight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """W [N, K] in the order of its own columns, in plain torch: the kernels' oracle, also used to load weights on a CPU."""
    octets = weight.words.view(torch.uint8).view(weight.outputs, -1, 4)
    nibbles = torch.stack((octets & 15, octets >> 4), -1).view(weight.outputs, -1, BLOCK_WORDS, 2, 4)
    q = nibbles.permute(0, 1, 4, 2, 3).reshape(weight.outputs, -1).to(torch.int16)
    of = torch.arange(q.shape[1], device=q.device) // weight.group
    zeros = SYMMETRIC_ZERO if weight.zeros is None else weight.zeros.t().to(torch.int16)[:, of]
    return ((q - zeros).float() * weight.scales.t().float()[:, of])[:, : weight.inputs].to(dtype)
