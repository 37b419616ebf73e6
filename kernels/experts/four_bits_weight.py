"""Experts' 4-bit weights as the kernels of `four_bits` read them: integers with scales of groups, or mxfp4's small floats.

    integers    W[e, n, k] = (q - z) * s                  as in `linear/int4_weight`, expert by expert
    mxfp4       W[e, n, k] = code * 2^(exponent - 127)    code e2m1, exponent e8m0 of 32 of K

Both pack 8 weights of a row into words of 32 bits, 16 words to a chunk of 128 of K (zeros behind its end); half h of word j
holds the weights k = 32 t + 2 j + h, for stretches t in 0..3. An integer is at bit 4 t of its half. A code's sign, exponent and
fraction are placed so that few instructions move them to bits 15 and 8 to 6, and then the half *is* bfloat16, code * 2^-126:

    t = 0   bits 15, 8 7 6       t = 1   12, 5 4 3 (shifted by 3)       t = 2   9, 2 1 0 (by 6)       t = 3   14, 13 11 10

mxfp4's scales are bytes s, four of a chunk in an int32, which also cancel 2^-126: W = half * 2^(s - 127) * factor, factor a
power of two a row (1, except for rows with scales above 2, which would not fit into 8 bits).
"""

from typing import NamedTuple

import torch

from quire.kernels.linear import int4_weight
from quire.kernels.linear.int4_weight import BLOCK, BLOCK_WORDS, SYMMETRIC_ZERO

MX_GROUP = 32
E8M0_NAN, MOST = 255, 254  # e8m0's NaN; a float's largest exponent
HALF_EXPONENT = 126  # a half is the code times 2^-126
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class FourBits(NamedTuple):
    """words int32 [E, N, Kp / 8], Kp = K rounded up to a multiple of 128.

    Integers: scales float [E, G, N], zeros uint8 [E, G, N], None if all are 8. mxfp4: scales int32 [E, Kp / 128, N], factors
    float32 [E, N].
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    factors: torch.Tensor | None
    group: int  # along K; at least Kp if there is one group
    inputs: int  # K

    @property
    def is_mx(self) -> bool:
        return self.factors is not None

    @property
    def shape(self) -> tuple[int, int, int]:
        experts, outputs, _ = self.words.shape
        return experts, outputs, self.inputs


class FourBitWeights(NamedTuple):
    """All experts of a layer, or one rank's; as `experts_reference.Weights`."""

    gate_up: FourBits
    down: FourBits
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


def blocks_of(inputs: int) -> int:
    return -(-inputs // BLOCK)


def new_mx(experts: int, outputs: int, inputs: int, device: torch.device | str) -> FourBits:
    """mxfp4 weights without values yet."""
    blocks = blocks_of(inputs)
    words = torch.empty(experts, outputs, blocks * BLOCK_WORDS, dtype=torch.int32, device=device)
    scales = torch.empty(experts, blocks, outputs, dtype=torch.int32, device=device)
    factors = torch.empty(experts, outputs, dtype=torch.float32, device=device)
    return FourBits(words, scales, None, factors, MX_GROUP, inputs)


def new_int(experts: int, outputs: int, inputs: int, group: int, dtype: torch.dtype, device: torch.device | str) -> FourBits:
    """Integer weights without values yet; scales of this dtype, zeros included."""
    blocks = blocks_of(inputs)
    group = blocks * BLOCK if not 0 < group < inputs else group
    words = torch.empty(experts, outputs, blocks * BLOCK_WORDS, dtype=torch.int32, device=device)
    shape = (experts, -(-blocks * BLOCK // group), outputs)
    zeros = torch.empty(shape, dtype=torch.uint8, device=device)
    return FourBits(words, torch.empty(shape, dtype=dtype, device=device), zeros, None, group, inputs)


def put_mx(into: FourBits, experts: slice, rows: slice, octets: torch.Tensor, exponents: torch.Tensor) -> None:
    """Store some rows of some experts: codes as for `mx_words`, [E', N', K / 2], exponents uint8 [E', N', K / 32].

    Raises ValueError for a NaN.
    """
    if bool((exponents == E8M0_NAN).any()):
        raise ValueError("a scale is NaN (255)")
    blocks = into.scales.shape[1]
    into.words[experts, rows] = mx_words(octets)
    # s <= 254, since it is the exponent of a float; the excess goes to the row's factor
    wide = exponents.to(torch.int32) + HALF_EXPONENT
    above = (wide.amax(-1) - MOST).clamp(min=0)
    into.factors[experts, rows] = torch.ldexp(torch.ones_like(above, dtype=torch.float32), above)  # type: ignore[index]
    four = torch.zeros(*wide.shape[:2], blocks * 4, dtype=torch.uint8, device=wide.device)
    four[..., : wide.shape[2]] = (wide - above[..., None]).to(torch.uint8)
    into.scales[experts, :, rows] = four.view(torch.int32).transpose(1, 2)


def mx_words(octets: torch.Tensor) -> torch.Tensor:
    """int32 [..., Kp / 8] of codes uint8 [..., K / 2], two a byte, the low nibble first."""
    places = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 11, 10))
    nibble = torch.arange(16, device=octets.device, dtype=torch.int32)
    found = None
    for t, where in enumerate(places):
        half = torch.zeros_like(nibble)
        for bit, at in zip((3, 2, 1, 0), where, strict=True):
            half |= (nibble >> bit & 1) << at
        both = (half[None, :] | half[:, None] << 16).flatten()  # indexed by the byte
        part = both[_stretch(octets, t).to(torch.int32)]
        found = part if found is None else found.bitwise_or_(part)
    assert found is not None
    return found.flatten(-2)


def int_words(octets: torch.Tensor) -> torch.Tensor:
    """int32 [..., Kp / 8] of numbers 0 to 15, given like codes; packed as by `int4_weight.pack`."""
    found = None
    for t in range(4):
        octet = _stretch(octets, t).to(torch.int32)
        part = (octet & 15 | octet >> 4 << 16) << 4 * t
        found = part if found is None else found.bitwise_or_(part)
    assert found is not None
    return found.flatten(-2)


def _stretch(octets: torch.Tensor, t: int) -> torch.Tensor:
    """Bytes of stretch t of each chunk, [..., chunks, 16], with zeros behind the end of K."""
    missing = -octets.shape[-1] % (BLOCK // 2)
    if missing:
        octets = torch.nn.functional.pad(octets, (0, missing))
    return octets.unflatten(-1, (-1, 4, BLOCK_WORDS))[..., t, :]


def in_bytes(numbers: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K / 2] of uint8 [..., K], 0 to 15; K is even."""
    return numbers[..., 0::2] | numbers[..., 1::2] << 4


def put_int(
    into: FourBits, experts: slice, rows: slice, q: torch.Tensor, zeros: torch.Tensor | None, scales: torch.Tensor
) -> None:
    """Store q uint8 [E', N', K], zeros (None: 8) and scales [E', N', G] for some experts' rows."""
    into.words[experts, rows] = int_words(in_bytes(q))
    given, groups = scales.shape[-1], into.scales.shape[1]
    for tensor, values in ((into.scales, scales), (into.zeros, zeros)):
        assert tensor is not None
        some = tensor[experts, :, rows]
        if values is None:
            some.fill_(SYMMETRIC_ZERO)
        else:
            some[:, :given] = values.transpose(1, 2).to(tensor.dtype)
            if groups > given:  # groups of padding only
                some[:, given:] = 0


def narrowed(weight: FourBits, dtype: torch.dtype) -> FourBits:
    """The same numbers in less memory: no zeros if all are 8, scales in 16 bits if that changes none."""
    if weight.zeros is not None and bool((weight.zeros == SYMMETRIC_ZERO).all()):
        weight = weight._replace(zeros=None)
    short = weight.scales.to(dtype)
    return weight._replace(scales=short) if torch.equal(short.float(), weight.scales.float()) else weight


def unpack(weight: FourBits, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """W [E, N, K], in plain torch: the kernels' oracle."""
    experts, outputs, inputs = weight.shape
    if not weight.is_mx:
        found = [_int4_of(weight, e) for e in range(experts)]
        return torch.stack([int4_weight.unpack(one, dtype) for one in found])
    halves = weight.words.view(torch.int16).view(experts, outputs, -1, BLOCK_WORDS, 2).to(torch.int32)
    bits = torch.stack(
        (
            halves & 0x81C0,
            (halves << 3) & 0x81C0,
            (halves << 6) & 0x81C0,
            ((halves << 1) & 0x8000) | ((halves >> 5) & 0x0100) | ((halves >> 4) & 0x00C0),
        ),
        3,
    ).flatten(2)
    table = torch.tensor([*E2M1, *(-x for x in E2M1)], device=bits.device)
    values = table[(bits >> 12) & 8 | (bits >> 6) & 7][..., :inputs]
    stored = weight.scales.transpose(1, 2).flatten().view(torch.uint8).view(experts, outputs, -1)
    exponents = stored.to(torch.int32) - HALF_EXPONENT - 127
    scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float64), exponents) * weight.factors.double()[..., None]  # type: ignore[union-attr]
    return (values.double() * scales.repeat_interleave(MX_GROUP, -1)[..., :inputs]).to(dtype)


def _int4_of(weight: FourBits, expert: int) -> int4_weight.Int4Weight:
    zeros = None if weight.zeros is None else weight.zeros[expert]
    return int4_weight.Int4Weight(weight.words[expert], weight.scales[expert], zeros, weight.group, weight.inputs)
