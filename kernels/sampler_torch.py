"""The sampler on the CPU: its noise, the CPU worker's path, and the oracle of the kernels in `sampler`; same signatures.

Noise is stateless: a 32-bit hash of (seed, position, purpose, index), so a row draws the same whatever runs beside it. It
becomes an exponential variable E; the token with the least E / p wins, which is a draw from p (exponential race; Gumbel-max in
other words). The race has two levels, so that few tokens need noise: over blocks of SAMPLER_BLOCK tokens by their summed
weight, then within the block that won. A row with a filter races flat, over the tokens that pass. Both are exact draws.

Filters act in vLLM's order after the temperature: min-p (relative to the largest probability), top-k, top-p over what top-k
left. Each is a threshold on the logit: tokens that tie with the last one kept are kept too. Greedy takes the lowest index
among equals. NaN counts as -inf; a row without any finite logit gives token 0.

CPU and GPU agree bit for bit on the hash; E, sums and exponentials differ in the last bits. So their tokens may differ where
two scores, or a nucleus' mass and top_p, are equal within float32 rounding.
"""

import numpy as np
import torch

from quire.kernels.features_torch import processed_row
from quire.kernels.tables import (
    NUM_TOP,
    S_FEATURE_ROW,
    S_MIN_P,
    S_SEED_HI,
    S_SEED_LO,
    S_TEMPERATURE,
    S_TOP_K,
    S_TOP_P,
    SAMPLER_BLOCK,
    FeaturePool,
    SamplerWorkspace,
    SlotTables,
)

PURPOSE_BLOCK, PURPOSE_TOKEN = 0, 1
LARGEST = np.float32(3e38)  # +inf counts as this
PROMPT_LOGPROB_ROWS = 32  # rows in float32 at a time


def noise_bits(seed_lo: int, seed_hi: int, position: int, purpose: int, index: np.ndarray) -> np.ndarray:
    """uint32 hash per index (uint32): two rounds of a mixing function keyed with 64 bits made of the rest."""
    lo, hi, at, why = (np.asarray([x & 0xFFFFFFFF], np.uint32) for x in (seed_lo, seed_hi, position, purpose))
    first = _mix(_mix(_mix(lo + (why + np.uint32(0x9E3779B9))) ^ hi) + at)
    second = _mix(_mix(_mix(hi + (why + np.uint32(0x7F4A7C15))) ^ at) + lo)
    return _mix(_mix(index ^ first) + second)


def _mix(x: np.ndarray) -> np.ndarray:
    """A bijection of uint32 with low bias: xor-shift-multiply; Wellons, "Prospecting for hash functions" (2018)."""
    x = x ^ (x >> np.uint32(17))
    x *= np.uint32(0xED5AD4BB)
    x ^= x >> np.uint32(11)
    x *= np.uint32(0xAC4C1B51)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x31848BAB)
    x ^= x >> np.uint32(14)
    return x


def log_exponential(bits: np.ndarray) -> np.ndarray:
    """log(E), E = -log1p(-U), U = (bits + 1/2) / 2^32: full float32 resolution where E is small, which is where it wins."""
    u = np.minimum((bits.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32), np.float32(1 - 2**-24))
    return np.log(-np.log1p(-u))


def sample(
    logits: torch.Tensor,
    row_slots: torch.Tensor,
    positions: torch.Tensor,
    tables: SlotTables,
    pool: FeaturePool,
    workspace: SamplerWorkspace | None = None,
    *,
    random: bool,
    filtered: bool = False,
    features: bool = False,
    bitmask: torch.Tensor | None = None,
) -> torch.Tensor:
    """int32 [R] tokens. See `sampler.sample`."""
    rows = logits.shape[0]
    out = np.zeros(rows, np.int32)
    state, slots, at = tables.host, row_slots[:rows].tolist(), positions[:rows].tolist()
    for row in range(rows):
        params = state["params"][slots[row]]
        x = logits[row]
        if features and 0 <= params[S_FEATURE_ROW] < pool.num_rows:
            x = torch.from_numpy(processed_row(x.float().numpy(), params, at[row], state["history"][slots[row]], pool))
        if bitmask is not None and not bool((bitmask[row] == -1).all()):
            x = _masked(x, bitmask[row])
        if random and params.view(np.float32)[S_TEMPERATURE] > 0:
            out[row] = _draw(x.float().numpy(), params, at[row], filtered)
        else:
            out[row] = _argmax(x)
    return torch.from_numpy(out)


def _masked(x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    bits = np.unpackbits(words.contiguous().numpy().view(np.uint8), bitorder="little", count=x.shape[0])
    return x.masked_fill(torch.from_numpy(bits == 0), -torch.inf)


def _argmax(x: torch.Tensor) -> int:
    """Lowest index of the largest value; by numpy, which takes 15 µs for 152k values where torch took 500 in bfloat16."""
    best = int(x.float().numpy().argmax())
    if torch.isnan(x[best]):
        best = int(torch.nan_to_num(x.float(), nan=-torch.inf, posinf=float(LARGEST), neginf=-torch.inf).numpy().argmax())
    return best


def _draw(x: np.ndarray, params: np.ndarray, position: int, filtered: bool) -> int:
    """One random token of a row of float32 logits."""
    top = x.max()
    if not top <= LARGEST:  # +inf or NaN
        x = np.minimum(np.where(np.isnan(x), np.float32(-np.inf), x), LARGEST)
        top = x.max()
    if top == -np.inf:
        return 0
    floats = params.view(np.float32)
    key = (int(params[S_SEED_LO]), int(params[S_SEED_HI]), position)
    temperature, top_k, top_p, min_p = floats[S_TEMPERATURE], int(params[S_TOP_K]), floats[S_TOP_P], floats[S_MIN_P]
    scale = np.float32(1) / temperature
    if filtered and (0 < top_k < len(x) or top_p < 1 or min_p > 0):
        ids = np.flatnonzero(x >= _threshold(x, top, temperature, top_k, top_p, min_p))
        log_e = log_exponential(noise_bits(*key, PURPOSE_TOKEN, ids.astype(np.uint32)))
        return int(ids[((x[ids] - top) * scale - log_e).argmax()])

    blocks = -(-len(x) // SAMPLER_BLOCK)
    weights = torch.zeros(blocks * SAMPLER_BLOCK)
    torch.sub(torch.from_numpy(x), float(top), out=weights[: len(x)]).mul_(float(scale)).exp_()
    sums = weights.view(blocks, SAMPLER_BLOCK).sum(1).numpy()
    log_e = log_exponential(noise_bits(*key, PURPOSE_BLOCK, np.arange(blocks, dtype=np.uint32)))
    with np.errstate(divide="ignore"):  # an empty block has weight 0
        first = int((np.log(sums) - log_e).argmax()) * SAMPLER_BLOCK
    ids = np.arange(first, min(first + SAMPLER_BLOCK, len(x)), dtype=np.uint32)
    log_e = log_exponential(noise_bits(*key, PURPOSE_TOKEN, ids))
    return first + int(((x[first : first + SAMPLER_BLOCK] - top) * scale - log_e).argmax())


def _threshold(
    x: np.ndarray, top: np.float32, temperature: np.float32, top_k: int, top_p: np.float32, min_p: np.float32
) -> np.float32:
    """The least logit that min-p, top-k and top-p keep."""
    least = np.float32(-np.inf)
    if min_p > 0:
        least = top + temperature * np.log(min_p)
    kept = x[x >= least] if min_p > 0 else x
    if 0 < top_k < len(kept):
        kept = _at_least_kth(kept, top_k)
        least = max(least, kept.min())
    if top_p < 1:
        least = max(least, _nucleus_end(kept, top, temperature, float(top_p)))
    return least


def _nucleus_end(x: np.ndarray, top: np.float32, temperature: np.float32, top_p: float) -> np.float32:
    """The last value, from the largest down, above which there is less than top_p of the mass."""
    weights = torch.from_numpy(x).sub(float(top)).div_(float(temperature)).exp_()
    total = float(weights.sum(dtype=torch.float64))
    # tokens of less than this have less than 1 - top_p together: no need to sort them
    large = weights.numpy() >= 0.99 * (1 - top_p) * total / len(x)
    order = np.argsort(-x[large])
    sorted_weights = weights.numpy()[large][order].astype(np.float64)
    above = np.cumsum(sorted_weights) - sorted_weights
    return x[large][order][np.flatnonzero(above < top_p * total)[-1]]


def _at_least_kth(x: np.ndarray, k: int) -> np.ndarray:
    """The values of x that are not below its k-th largest. The k-th largest maximum of blocks bounds it from below."""
    blocks = len(x) // SAMPLER_BLOCK
    if k <= blocks:
        maxima = x[: blocks * SAMPLER_BLOCK].reshape(blocks, SAMPLER_BLOCK).max(1)
        x = x[x >= np.partition(maxima, blocks - k)[blocks - k]]
    return x[x >= np.partition(x, len(x) - k)[len(x) - k]]


def sampled_logprobs(
    logits: torch.Tensor, sampled: torch.Tensor, workspace: SamplerWorkspace | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Raw log-probabilities of the sampled tokens and of the NUM_TOP best. See `sampler.sampled_logprobs`."""
    return prompt_logprobs(logits, sampled, NUM_TOP)


def prompt_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Raw log-probabilities on any device: (of the target f32 [N], its rank i32 [N], top ids i32 [N, num_top], theirs f32).

    logits [N, V], targets int [N] (those outside the vocabulary are clamped). rank = 1 + number of larger logits.
    num_top is capped by the vocabulary; columns beyond it hold id 0 at -inf.
    """
    parts = [
        _logprobs(logits[i : i + PROMPT_LOGPROB_ROWS].float(), targets[i : i + PROMPT_LOGPROB_ROWS].long(), num_top)
        for i in range(0, len(logits), PROMPT_LOGPROB_ROWS)
    ]
    if not parts:
        parts = [_logprobs(logits.new_zeros((0, max(logits.shape[1], 1)), dtype=torch.float32), targets[:0].long(), num_top)]
    logprob, rank, ids, top = (torch.cat(x) for x in zip(*parts, strict=True))
    return logprob, rank, ids, top


def _logprobs(x: torch.Tensor, targets: torch.Tensor, num_top: int) -> tuple[torch.Tensor, ...]:
    norm = x.logsumexp(-1, keepdim=True)
    target = x.gather(1, targets.clamp(0, x.shape[1] - 1).unsqueeze(1))
    rank = (x > target).sum(1, dtype=torch.int32) + 1
    values, ids = x.topk(min(num_top, x.shape[1]), dim=1)
    missing = num_top - values.shape[1]
    values = torch.nn.functional.pad(values - norm, (0, missing), value=-torch.inf)
    return (target - norm).squeeze(1), rank, torch.nn.functional.pad(ids.int(), (0, missing)), values
