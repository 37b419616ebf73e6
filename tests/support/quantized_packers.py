"""One layer's weight as packers store it: its tensors, and the values that they represent. For quantized_models.py.

It packs with shifts and loops, independently of the code that reads; the real packers' files are tests/workers/goldens.
"""

import json

import torch

Tensors = dict[str, torch.Tensor]
# of each layer's inputs; q, k and v differ, which a fused product must not forget
STATIC = {
    "q_proj": 0.011,
    "k_proj": 0.017,
    "v_proj": 0.006,
    "o_proj": 0.01,
    "gate_proj": 0.012,
    "up_proj": 0.008,
    "down_proj": 0.05,
}


def words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned integers [R, C] -> int32 [R, ⌈C · bits / 32⌉], low bits first."""
    per_word = 32 // bits
    values = torch.nn.functional.pad(values.to(torch.int64), (0, -values.shape[1] % per_word))
    out = torch.zeros(values.shape[0], values.shape[1] // per_word, dtype=torch.int64)
    for i in range(per_word):
        out |= values[:, i::per_word] << bits * i
    return torch.where(out >= 1 << 31, out - (1 << 32), out).to(torch.int32)


def integers(w: torch.Tensor, bits: int, g_idx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [N, K], z and s [N, groups], asymmetric."""
    groups = int(g_idx.max()) + 1
    low = torch.stack([w[:, g_idx == i].amin(1) for i in range(groups)], 1).clamp(max=0)
    high = torch.stack([w[:, g_idx == i].amax(1) for i in range(groups)], 1).clamp(min=0)
    top = (1 << bits) - 1
    s = ((high - low) / top).half().float()
    z = (-low / s).round().clamp(0, top)
    return (w / s[:, g_idx] + z[:, g_idx]).round().clamp(0, top), z, s


def gptq(w: torch.Tensor, name: str, bits: int, g: int, offset: int, order: bool) -> tuple[Tensors, torch.Tensor]:
    k = w.shape[1]
    g_idx = torch.arange(k) // g
    if order:  # layers with the same inputs share an order
        g_idx = g_idx[torch.randperm(k, generator=torch.Generator().manual_seed(k + ("o_proj" in name)))]
    q, z, s = integers(w, bits, g_idx)
    packed = words(z.t(), bits)
    if offset:
        packed = (packed.to(torch.int64) - (0x11111111 if bits == 4 else 0x01010101)).to(torch.int32)
    tensors = {"qweight": words(q, bits).t(), "qzeros": packed, "scales": s.t().half(), "g_idx": g_idx.int()}
    return tensors, (q - z[:, g_idx]) * s[:, g_idx]


def awq(w: torch.Tensor, name: str) -> tuple[Tensors, torch.Tensor]:
    n, k = w.shape
    g_idx = torch.arange(k) // 32
    q, z, s = integers(w, 4, g_idx)
    columns = torch.tensor([8 * i + c for i in range(n // 8) for c in (0, 2, 4, 6, 1, 3, 5, 7)])
    tensors = {"qweight": words(q.t()[:, columns], 4), "qzeros": words(z.t()[:, columns], 4), "scales": s.t().half()}
    return tensors, (q - z[:, g_idx]) * s[:, g_idx]


def packed(w: torch.Tensor, name: str) -> tuple[Tensors, torch.Tensor]:
    g_idx = torch.arange(w.shape[1]) // 16
    q, z, s = integers(w, 4, g_idx)
    tensors = {"weight_packed": words(q, 4), "weight_scale": s, "weight_zero_point": words(z.t(), 4).t()}
    return {**tensors, "weight_shape": torch.tensor(w.shape)}, (q - z[:, g_idx]) * s[:, g_idx]


def int8_rows(w: torch.Tensor, name: str) -> tuple[Tensors, torch.Tensor]:
    s = w.abs().amax(1, keepdim=True) / 127
    q = (w / s).round()
    return {"weight": q.to(torch.int8), "weight_scale": s}, q * s


def fp8_tensor(w: torch.Tensor, name: str) -> tuple[Tensors, torch.Tensor]:
    s = w.abs().amax() / 448
    q = (w / s).to(torch.float8_e4m3fn)
    return {"weight": q, "weight_scale": s, "input_scale": torch.tensor(STATIC[name.split(".")[-1]])}, q.float() * s


def fp8_blocks(w: torch.Tensor, height: int, width: int) -> tuple[Tensors, torch.Tensor]:
    n, k = w.shape
    rows, columns = -(-n // height), -(-k // width)
    s, spread = torch.empty(rows, columns), torch.empty(n, k)
    for i in range(rows):
        for j in range(columns):
            part = slice(height * i, height * (i + 1)), slice(width * j, width * (j + 1))
            s[i, j] = w[part].abs().amax() / 448
            spread[part] = s[i, j]
    q = (w / spread).to(torch.float8_e4m3fn)
    return {"weight": q, "weight_scale_inv": s}, q.float() * spread


def fp8_rows(w: torch.Tensor, name: str) -> tuple[Tensors, torch.Tensor]:
    s = w.abs().amax(1, keepdim=True) / 448
    q = (w / s).to(torch.float8_e4m3fn)
    return {"weight": q, "weight_scale": s}, q.float() * s


def symmetric(w: torch.Tensor, g: int) -> tuple[Tensors, torch.Tensor]:
    """compressed-tensors' 4 bits in groups."""
    groups = w.reshape(len(w), -1, g)
    s = groups.abs().amax(-1, keepdim=True) / 7
    q = (groups / s).round()
    tensors = {
        "weight_packed": words(q.reshape(w.shape) + 8, 4),
        "weight_scale": s[..., 0],
        "weight_shape": torch.tensor(w.shape),
    }
    return tensors, (q * s).reshape(w.shape)


def nf4(w: torch.Tensor, name: str) -> tuple[Tensors, torch.Tensor]:
    table = torch.linspace(-1, 1, 16) ** 3
    blocks = w.reshape(-1, 64)
    absmax = blocks.abs().amax(1)
    codes = (blocks[:, :, None] / absmax[:, None, None] - table).abs().argmin(-1).flatten()
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(w.shape)}
    tensors = {
        "weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
        "weight.absmax": absmax,
        "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return tensors, (table[codes].view(-1, 64) * absmax[:, None]).reshape(w.shape)


def bnb_int8(w: torch.Tensor, name: str) -> tuple[Tensors, torch.Tensor]:
    scb = w.abs().amax(1)
    q = (w * 127 / scb[:, None]).round()
    return {"weight": q.to(torch.int8), "SCB": scb}, q * (scb / 127)[:, None]


def mxfp4(w: torch.Tensor, name: str) -> tuple[Tensors, torch.Tensor]:
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    groups = w.reshape(w.shape[0], -1, 32)
    exponent = (groups.abs().amax(2) / 6).log2().ceil()
    scaled = groups / 2 ** exponent[:, :, None]
    codes = (scaled[..., None] - table).abs().argmin(-1)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    tensors = {"weight_blocks": blocks, "weight_scales": (exponent + 127).to(torch.uint8)}
    return tensors, (table[codes] * 2 ** exponent[:, :, None]).view(w.shape)
