"""The sampler on the CPU: its noise, the CPU worker's path, and the oracle of the kernels in `sampler`; same signatures.

Noise is stateless: a 32-bit hash of (seed, position, purpose, index), so a row draws the same in any batch. It becomes an
exponential variable E; the token with the least E / p wins, which is a draw from p (exponential race; in other words
Gumbel-max). The race has two levels, so that few tokens need noise: over blocks of SAMPLER_BLOCK tokens by their summed weight,
then within the winning block. A row with a filter races over all tokens that pass, without blocks. Both are exact draws.

Filters act in vLLM's order after the temperature: min-p (relative to the largest probability), top-k, then top-p over the rest.
Each is a threshold on the logit: tokens that tie with the last one kept are kept too. Greedy takes the lowest index among
equals. NaN counts as -inf; a row without any finite logit gives token 0, or NO_TOKEN if it has processors: they (and the mask)
may leave no token, and the request must then be told. A masked row behind a draft gives NO_TOKEN, too: its window ends there.

CPU and GPU agree bit for bit on the hash; E, sums and exponentials differ in the last bits. So their tokens may differ if two
scores, or a nucleus' mass and top_p, are equal within float32 rounding.
"""

import numpy as np
import torch

from quire.ipc.step.sections import NO_TOKEN, SLOT
from quire.kernels.sampling.logits_processors import NO_DRAFTS, processed_row
from quire.kernels.sampling.top_logits import log_sum_exp, top_logits
from quire.kernels.step.tables import NUM_TOP, SAMPLER_BLOCK, LogitsProcessorPool, SamplerWorkspace, SlotTables, WindowIds

S_TEMPERATURE, S_TOP_K, S_TOP_P, S_MIN_P = (SLOT.at[name] for name in ("temperature", "top_k", "top_p", "min_p"))
S_SEED_LO, S_SEED_HI, S_HAS_PROCESSORS = SLOT.at["seed"], SLOT.at["seed"] + 1, SLOT.at["has_processors"]
PURPOSE_BLOCK, PURPOSE_TOKEN = 0, 1
LARGEST = np.float32(3e38)  # +inf counts as this
_OFFSETS = np.arange(SAMPLER_BLOCK, dtype=np.uint32)
PROMPT_LOGPROB_ROWS = RACE_ROWS = 32  # rows in float32 at a time


def noise_bits(seed_lo: int, seed_hi: int, position: int, purpose: int, index: np.ndarray) -> np.ndarray:
    """uint32 hash per index (uint32): two rounds of a mixing function, keyed with 64 bits derived from the other arguments."""
    first, second = noise_key(seed_lo, seed_hi, position, purpose)
    return _keyed(np.uint32(first), np.uint32(second), index)


def noise_key(seed_lo: int, seed_hi: int, position: int, purpose: int) -> tuple[int, int]:
    """The keys of the two rounds. In plain integers: an array operation on one element takes ten times as long."""
    lo, hi, at = seed_lo & 0xFFFFFFFF, seed_hi & 0xFFFFFFFF, position & 0xFFFFFFFF
    first = _mix_int(_mix_int(_mix_int(lo + purpose + 0x9E3779B9) ^ hi) + at)
    second = _mix_int(_mix_int(_mix_int(hi + purpose + 0x7F4A7C15) ^ at) + lo)
    return first, second


def _keyed(first: np.ndarray | np.uint32, second: np.ndarray | np.uint32, index: np.ndarray) -> np.ndarray:
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


def _mix_int(x: int) -> int:
    """`_mix` of one number, of which the low 32 bits count."""
    x &= 0xFFFFFFFF
    x ^= x >> 17
    x = x * 0xED5AD4BB & 0xFFFFFFFF
    x ^= x >> 11
    x = x * 0xAC4C1B51 & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x31848BAB & 0xFFFFFFFF
    return x ^ x >> 14


def log_exponential(bits: np.ndarray) -> np.ndarray:
    """log(E), E = -log1p(-U), U = (bits + 1/2) / 2^32: full float32 resolution where E is small, which is where it wins."""
    u = np.minimum((bits.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32), np.float32(1 - 2**-24))
    return np.log(-np.log1p(-u))


def sample(
    logits: torch.Tensor,
    row_slots: torch.Tensor,
    positions: torch.Tensor,
    tables: SlotTables,
    pool: LogitsProcessorPool,
    workspace: SamplerWorkspace | None = None,
    *,
    random: bool,
    filtered: bool = False,
    processors: bool = False,
    bitmask: torch.Tensor | None = None,
    window: WindowIds | None = None,
) -> torch.Tensor:
    """int32 [R] tokens. See `sampler.sample`."""
    rows = logits.shape[0]
    out = np.zeros(rows, np.int32)
    values, owned = logits.float().numpy(), logits.dtype != torch.float32
    params, slots, at = tables.host["params"], row_slots[:rows].tolist(), positions[:rows].tolist()
    racing, processed = [], []
    for row, slot in enumerate(slots):
        x = raw = values[row]
        is_processed = processors and params[slot, S_HAS_PROCESSORS] != 0
        if is_processed:
            x = processed_row(x, slot, at[row], tables, pool, NO_DRAFTS if window is None else _drafts_before(row, window))
        if bitmask is not None and not bool((bitmask[row] == -1).all()):
            x = _masked(x, bitmask[row])
            is_processed |= window is not None and int(window.places[row]) > 0  # a mask of zeros ends a window
        if is_processed:
            processed.append((row, x))
        floats = params[slot].view(np.float32)
        if not random or not floats[S_TEMPERATURE] > 0:
            out[row] = _argmax(x)
        elif filtered and (0 < params[slot, S_TOP_K] < len(x) or floats[S_TOP_P] < 1 or floats[S_MIN_P] > 0):
            out[row] = _draw_filtered(x, params[slot], at[row])
        else:
            racing.append(row)
            if x is not raw:
                values, owned = (values if owned else values.copy()), True
                values[row] = x
    for begin in range(0, len(racing), RACE_ROWS):
        some = racing[begin : begin + RACE_ROWS]
        x = values if len(some) == rows else values[some]
        out[some], _ = race(x, params[[slots[row] for row in some]], [at[row] for row in some])
    for row, x in processed:
        if not x[out[row]] > -np.inf:  # so no other token is higher
            out[row] = NO_TOKEN
    return torch.from_numpy(out)


def _drafts_before(sample: int, window: WindowIds) -> np.ndarray:
    place = int(window.places[sample])
    own = sample * window.stride + place if window.stride else sample
    return window.input_ids[own - place + 1 : own + 1].numpy()


def _masked(x: np.ndarray, words: torch.Tensor) -> np.ndarray:
    bits = np.unpackbits(words.contiguous().numpy().view(np.uint8), bitorder="little", count=x.shape[0])
    return np.where(bits == 0, np.float32(-np.inf), x)


def _argmax(x: np.ndarray) -> int:
    """Lowest index of the largest value; by numpy, which takes 15 µs for 152k values, where torch took 500 in bfloat16."""
    best = int(x.argmax())
    return int(finite(x).argmax()) if np.isnan(x[best]) else best


def finite(x: np.ndarray) -> np.ndarray:
    """x with -inf for NaN, and LARGEST for +inf."""
    return np.minimum(np.where(np.isnan(x), np.float32(-np.inf), x), LARGEST)


def race(x: np.ndarray, params: np.ndarray, positions: list[int], first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A random token of each row of x, int64 [R], and its block's score, float32 [R]; x float32 [R, V], none filtered.

    params: [R, words] of their slots. first: the number of x's first token in the whole vocabulary, by which the noise is
    indexed; it is a block's first.
    """
    top = x.max(1, keepdims=True)
    if not (top <= LARGEST).all():  # +inf or NaN
        x = finite(x)
        top = x.max(1, keepdims=True)
    empty = top == -np.inf
    rows, vocab, blocks = len(x), x.shape[1], -(-x.shape[1] // SAMPLER_BLOCK)
    scores = torch.empty(rows, blocks * SAMPLER_BLOCK)
    scores[:, vocab:] = -torch.inf
    scale = np.float32(1) / params.view(np.float32)[:, S_TEMPERATURE, None]
    shown = scores.numpy()
    np.multiply(np.subtract(x, np.where(empty, 0, top), out=shown[:, :vocab]), scale, out=shown[:, :vocab])
    by_block = scores.view(rows, blocks, SAMPLER_BLOCK)
    sums = by_block.exp().sum(2).log_().numpy()  # -inf for an empty block
    seeds = params[:, [S_SEED_LO, S_SEED_HI]].tolist()
    numbers = np.arange(blocks, dtype=np.uint32) + np.uint32(first // SAMPLER_BLOCK)
    block_scores = sums - _log_e(seeds, positions, PURPOSE_BLOCK, numbers)
    block, row = block_scores.argmax(1), np.arange(rows)
    ids = block.astype(np.uint32)[:, None] * np.uint32(SAMPLER_BLOCK) + (_OFFSETS + np.uint32(first))
    last = (by_block.numpy()[row, block] - _log_e(seeds, positions, PURPOSE_TOKEN, ids)).argmax(1)
    return np.where(empty[:, 0], 0, block * SAMPLER_BLOCK + last), block_scores[row, block]


def _log_e(seeds: list[list[int]], positions: list[int], purpose: int, index: np.ndarray) -> np.ndarray:
    """log(E) [R, index's last size] for each row; index: shared by all rows, or [R, n]."""
    keys = np.array([noise_key(lo, hi, at, purpose) for (lo, hi), at in zip(seeds, positions, strict=True)], np.uint32)
    return log_exponential(_keyed(keys[:, :1], keys[:, 1:], index))


def _draw_filtered(x: np.ndarray, params: np.ndarray, position: int) -> int:
    """A random token of those that pass the filters of a row, float32 [V]."""
    top = x.max()
    if not top <= LARGEST:  # +inf or NaN
        x = finite(x)
        top = x.max()
    if top == -np.inf:
        return 0
    floats = params.view(np.float32)
    key = (int(params[S_SEED_LO]), int(params[S_SEED_HI]), position)
    temperature, top_k, top_p, min_p = floats[S_TEMPERATURE], int(params[S_TOP_K]), floats[S_TOP_P], floats[S_MIN_P]
    scale = np.float32(1) / temperature
    ids = np.flatnonzero(x >= _threshold(x, top, temperature, top_k, top_p, min_p))
    log_e = log_exponential(noise_bits(*key, PURPOSE_TOKEN, ids.astype(np.uint32)))
    return int(ids[((x[ids] - top) * scale - log_e).argmax()])


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
    # tokens below this have less than 1 - top_p together: they need no sorting
    large = weights.numpy() >= 0.99 * (1 - top_p) * total / len(x)
    order = np.argsort(-x[large])
    sorted_weights = weights.numpy()[large][order].astype(np.float64)
    above = np.cumsum(sorted_weights) - sorted_weights
    return x[large][order][np.flatnonzero(above < top_p * total)[-1]]


def _at_least_kth(x: np.ndarray, k: int) -> np.ndarray:
    """The values of x that are at least its k-th largest; the k-th largest maximum of blocks is a lower bound of it."""
    blocks = len(x) // SAMPLER_BLOCK
    if k <= blocks:
        maxima = x[: blocks * SAMPLER_BLOCK].reshape(blocks, SAMPLER_BLOCK).max(1)
        x = x[x >= np.partition(maxima, blocks - k)[blocks - k]]
    return x[x >= np.partition(x, len(x) - k)[len(x) - k]]


def sampled_logprobs(
    logits: torch.Tensor, sampled: torch.Tensor, workspace: SamplerWorkspace | None = None, num_top: int = NUM_TOP
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Raw log-probabilities of the sampled tokens and of the num_top best. See `sampler.sampled_logprobs`."""
    return prompt_logprobs(logits, sampled, num_top)


def prompt_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Raw log-probabilities on any device: (of the target f32 [N], its rank i32 [N], top ids i32 [N, num_top], theirs f32).

    logits [N, V], targets int [N] (those outside the vocabulary are clamped). rank = 1 + number of larger logits. num_top is
    limited by the vocabulary; columns beyond it hold id 0 at -inf.
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
    norm = log_sum_exp(x)
    target = x.gather(1, targets.clamp(0, x.shape[1] - 1).unsqueeze(1))
    rank = (x > target).sum(1, dtype=torch.int32) + 1
    values, ids = top_logits(x, min(num_top, x.shape[1]))
    missing = num_top - values.shape[1]
    values = torch.nn.functional.pad(values - norm, (0, missing), value=-torch.inf)
    return (target - norm).squeeze(1), rank, torch.nn.functional.pad(ids.int(), (0, missing)), values
