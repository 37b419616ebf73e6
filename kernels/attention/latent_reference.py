"""Latent attention in plain torch: the oracle of `latent_rope_kv`, `latent_decode` and `latent_prefill`.

A token's entry in the cache is rotated | latent, R + L elements, shared by all heads. With q of the same form,

    out[t, h] = Σ_s softmax_s(scale · q[t, h] · entry[s]) latent[s],    s from 0 to t's position

q [T, Hq, R + L], out [T, Hq, L], cache [blocks, 1, block size, R + L]. Rotated pairs are the halves of R, as in any model.
"""

import torch


def latent_rope_kv(
    q: torch.Tensor,
    q_latent: torch.Tensor,
    kv: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache: torch.Tensor,
    *,
    interleaved: bool,
    q_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Queries [T, Hq, R + L] of q [T, Hq, N + R] and q_latent [Hq, T, L]; entries of kv [T, L + R] are written to the cache."""
    latent, rotary = q_latent.shape[2], kv.shape[1] - q_latent.shape[2]
    if cos_sin.shape[1] == 0:  # nothing is rotated
        half = cos_sin.new_zeros(len(cos_sin), rotary // 2)
        cos_sin = torch.cat((half + 1.0, half), 1)
    cos, sin = cos_sin[positions.long()].chunk(2, -1)

    def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        a, b = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    c = kv[:, :latent].float()
    c = norm_weight * (c * torch.rsqrt(c.square().mean(-1, keepdim=True) + eps)).to(kv.dtype)
    entries = torch.cat((rotated(kv[:, latent:], cos, sin), c), -1)
    written = slot_mapping >= 0
    cache.view(-1, cache.shape[3])[slot_mapping[written]] = entries[written]
    factor = torch.ones(len(q), 1, 1, device=q.device) if q_scales is None else q_scales[positions.long()][:, None, None]
    q_rotated = rotated(q[:, :, -rotary:], cos[:, None] * factor, sin[:, None] * factor)
    return torch.cat((q_rotated, (q_latent.transpose(0, 1).float() * factor).to(q.dtype)), -1)


def latent_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    rows: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    latent: int,
    hides_first: bool = False,
) -> torch.Tensor:
    """[T, Hq, L]; block_table int [slots, blocks], rows int [R] slots, query_start int [R + 1], seq_lens int [R]."""
    out = torch.zeros(*q.shape[:2], latent, dtype=q.dtype, device=q.device)
    size = cache.shape[2]
    for r, (slot, length) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        begin, end = query_start[r : r + 2].tolist()
        if not length or begin == end:
            continue
        entries = cache[block_table[slot, : -(-length // size)].long(), 0].flatten(0, 1)[:length].float()
        scores = torch.einsum("thd,sd->ths", q[begin:end].float(), entries) * scale
        position = torch.arange(length - (end - begin), length, device=q.device)
        scores.masked_fill_(torch.arange(length, device=q.device) > position[:, None, None], float("-inf"))
        if hides_first:
            scores.masked_fill_(torch.arange(length, device=q.device) < position.clamp(max=1)[:, None, None], float("-inf"))
        out[begin:end] = torch.einsum("ths,sl->thl", scores.softmax(-1), entries[:, -latent:]).to(q.dtype)
    return out
