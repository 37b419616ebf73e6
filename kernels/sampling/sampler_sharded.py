"""Sampling of greedy and plain random rows over a sharded vocabulary: GPUs exchange three words a row, and no logits.

    best_of_shard    of this rank's logits: their maximum, the score of the block that wins among its own, the token in it
    choose           of all ranks' words: the token of the rank with the block that wins among all

A rank's shard is whole SAMPLER_BLOCKs, and blocks and tokens have their global numbers for the noise: the race is that of
`sampler.sample` over the whole row. Its score is relative to the rank's own maximum; `choose` sees all of them, and takes the
first of equals. Rows with filters, processors or masks need all logits, and go to `sampler`. `sampler_sharded_cpu` does the
same in torch. Bytes: R * V / ranks of logits, plus one block a row.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.sampling.sampler import PARTIAL_BLOCKS, _partial_kernel
from quire.kernels.sampling.sampler_logits import (
    BLOCK,
    PURPOSE_BLOCK,
    PURPOSE_TOKEN,
    S_SEED_HI,
    S_SEED_LO,
    S_TEMPERATURE,
    float_param,
    log_exponential,
    noise_bits,
    row_state,
)
from quire.kernels.step import tables as words
from quire.kernels.step.tables import LogitsProcessorPool, ShardedWorkspace, SlotTables

TOP, SCORE, TOKEN = (tl.constexpr(at) for at in range(words.SHARD_WORDS))  # planes of exchanged words, int32, floats as bits


@triton.jit
def _best_of_shard_kernel(
    logits, stride, row_slots, positions, slot_params, block_max, block_sum, best, V, first, num_blocks, num_slots, num_rows,
    BLOCKS: tl.constexpr, RANDOM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    param_row, position, _ = row_state(row, row_slots, positions, slot_params, num_slots)
    blocks = tl.arange(0, BLOCKS)
    maxima = tl.load(block_max + row * num_blocks + blocks, blocks < num_blocks, other=-float("inf"))
    top = tl.max(maxima, 0)
    key = maxima
    if RANDOM:
        temperature = float_param(param_row, S_TEMPERATURE)
        random = temperature > 0.0
        scale = 1.0 / tl.where(random, temperature, 1.0)
        reference = tl.where(top == -float("inf"), 0.0, top)
        seed_lo = tl.load(param_row + S_SEED_LO)
        seed_hi = tl.load(param_row + S_SEED_HI)
        total = tl.load(block_sum + row * num_blocks + blocks, blocks < num_blocks, other=1.0)
        log_e = log_exponential(noise_bits(seed_lo, seed_hi, position, PURPOSE_BLOCK, first // BLOCK + blocks))
        key = tl.where(random, (maxima - reference) * scale + tl.log(total) - log_e, maxima)
    cols = tl.argmax(key, 0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + cols, cols < V, other=-float("inf")).to(tl.float32)
    x = tl.where(x == x, x, -float("inf"))
    x = tl.minimum(x, 3e38) + 0.0
    if RANDOM:
        log_e = log_exponential(noise_bits(seed_lo, seed_hi, position, PURPOSE_TOKEN, first + cols))
        x = tl.where(random, (x - reference) * scale - log_e, x)
    token = tl.minimum(tl.argmax(key, 0) * BLOCK + tl.argmax(x, 0), V - 1)
    tl.store(best + TOP * num_rows + row, top.to(tl.int32, bitcast=True))
    tl.store(best + SCORE * num_rows + row, tl.max(key, 0).to(tl.int32, bitcast=True))
    tl.store(best + TOKEN * num_rows + row, (first + token).to(tl.int32))


@triton.jit
def _choose_kernel(
    everyone, row_slots, slot_params, sampled, num_rows, size, num_slots, RANKS: tl.constexpr, RANDOM: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    param_row, _, _ = row_state(row, row_slots, row_slots, slot_params, num_slots)
    ranks = tl.arange(0, RANKS)
    at = everyone + ranks.to(tl.int64) * 3 * num_rows + row
    lowest: tl.constexpr = -8388608  # the bits of -inf
    tops = tl.load(at + TOP * num_rows, ranks < size, other=lowest).to(tl.float32, bitcast=True)
    key = tops
    if RANDOM:
        temperature = float_param(param_row, S_TEMPERATURE)
        random = temperature > 0.0
        scale = 1.0 / tl.where(random, temperature, 1.0)
        top = tl.max(tops, 0)
        top = tl.where(top == -float("inf"), 0.0, top)
        scores = tl.load(at + SCORE * num_rows, ranks < size, other=lowest).to(tl.float32, bitcast=True)
        key = tl.where(random, (tops - top) * scale + scores, tops)
    best = tl.argmax(key, 0)
    tl.store(sampled + row, tl.load(everyone + best.to(tl.int64) * 3 * num_rows + TOKEN * num_rows + row))


def best_of_shard(
    logits: torch.Tensor,
    first: int,
    row_slots: torch.Tensor,
    positions: torch.Tensor,
    tables: SlotTables,
    pool: LogitsProcessorPool,
    workspace: ShardedWorkspace,
    *,
    random: bool,
) -> torch.Tensor:
    """int32 [SHARD_WORDS, R], for this rank's logits [R, n] of the tokens from `first` on."""
    rows, vocab = logits.shape
    num_blocks, num_slots = triton.cdiv(vocab, words.SAMPLER_BLOCK), tables.max_num_seqs + 1
    if logits.stride(1) != 1 or rows > len(workspace.block_max) or workspace.block_max.shape[1] != num_blocks:
        raise ValueError(f"sampler_sharded: workspace does not fit logits {logits.shape}")
    best = torch.empty((words.SHARD_WORDS, rows), dtype=torch.int32, device=logits.device)
    if rows == 0:
        return best
    _partial_kernel[(rows, triton.cdiv(num_blocks, PARTIAL_BLOCKS))](
        logits, logits.stride(0), pool.counts, pool.counts.stride(0), pool.entries, pool.multiplier, pool.num_rows,
        row_slots, 0, row_slots, 0, row_slots, row_slots, row_slots, tables.params, workspace.block_max, workspace.block_sum,
        vocab, num_blocks, num_slots, PARTIAL_BLOCKS, random, 0, False, 0, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    _best_of_shard_kernel[(rows,)](
        logits, logits.stride(0), row_slots, positions, tables.params, workspace.block_max, workspace.block_sum, best, vocab,
        first, num_blocks, num_slots, rows, triton.next_power_of_2(num_blocks), random, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return best


def choose(everyone: torch.Tensor, row_slots: torch.Tensor, tables: SlotTables, *, random: bool) -> torch.Tensor:
    """int32 [R] tokens, from all ranks' words int32 [ranks, SHARD_WORDS, R]: the same on every rank."""
    size, _, rows = everyone.shape
    sampled = torch.empty(rows, dtype=torch.int32, device=everyone.device)
    if rows:
        _choose_kernel[(rows,)](
            everyone, row_slots, tables.params, sampled, rows, size, tables.max_num_seqs + 1, triton.next_power_of_2(size),
            random, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return sampled
