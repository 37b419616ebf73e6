"""The oracle of paged attention: plain, slow and in float64. Formula and masks, stated once more:

For row r with queries at positions p = seq_len - query_len .. seq_len - 1 and query head h over KV head h // group:

    out[p, h] = v_scale * sum_n softmax_n(s[p, n]) v[n],   n <= last[p], and p - n < window if window > 0, or, where
                                                              rows are chunked, n // window == p // window;
                                                              last[p] = p, or last_visible[p] if that is later
    s[p, n]   = scale * k_scale * <q[p, h], k[n]>, then softcap, ALiBi and, in the softmax's sum alone, a sink: see tile.py

Tests and benchmarks call this on any device; nothing that serves does. No Triton here.
"""

import torch

from quire.kernels.attention.score_shape import PLAIN_SCORES, ScoreShape


def attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    row_slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    is_chunked: bool = False,
    shape: ScoreShape = PLAIN_SCORES,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    last_visible: torch.Tensor | None = None,
) -> None:
    """Write out [T, Hq, D] for every row with queries; a row of seq_len 0 gets zeros. Arguments as in `prefill_attention`."""
    block_size = k_cache.shape[2]
    group = q.shape[1] // k_cache.shape[1]
    starts, lens, slots = query_start.tolist(), seq_lens.tolist(), row_slots.tolist()
    for row, seq_len in enumerate(lens):
        begin, end = starts[row], starts[row + 1]
        if seq_len == 0:
            out[begin:end] = 0
        if seq_len == 0 or begin == end:
            continue
        positions = torch.arange(seq_len - (end - begin), seq_len, device=q.device)
        first_keys = positions // window * window if window and is_chunked else (positions - (window or seq_len) + 1).clamp(0)
        if window < 0:
            first_keys = positions.clamp(max=1)
        first_key = int(first_keys[0])
        keys = torch.arange(first_key, seq_len, device=q.device)
        blocks = block_table[slots[row], keys // block_size].long()
        k = k_cache[blocks, :, keys % block_size].double()  # [n, Hkv, D]
        v = v_cache[blocks, :, keys % block_size].double()
        if k_scale is not None:
            k = k * k_scale.double()
        if v_scale is not None:
            v = v * v_scale.double()
        last = positions if last_visible is None else torch.maximum(positions, last_visible[begin:end])
        visible = (keys[None, :] <= last[:, None]) & (keys[None, :] >= first_keys[:, None])
        for head in range(q.shape[1]):
            scores = scale * q[begin:end, head].double() @ k[:, head // group].T
            if shape.softcap:
                scores = shape.softcap * torch.tanh(scores / shape.softcap)
            if shape.slopes is not None:
                scores += shape._replace(slopes=shape.slopes.double()).alibi(keys[None], positions[None])[0, head]
            scores = scores.masked_fill(~visible, float("-inf"))
            if shape.sinks is not None:
                scores = torch.cat((scores, shape.sinks[head].double().expand(len(scores), 1)), -1)
            weights = scores.softmax(dim=-1)[:, : len(keys)]
            out[begin:end, head] = (weights @ v[:, head // group]).to(out.dtype)
