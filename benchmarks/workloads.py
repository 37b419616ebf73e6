"""The offline workloads, the same for every engine: how long prompts and outputs are, and the prompts' token ids.

Ids are drawn from [10, 30000) (or below the vocabulary's end, if that is smaller), end-of-sequence is ignored and the
temperature is 1.0, so every engine makes exactly the output tokens asked for. `sharegpt_like` draws lognormal lengths like
ShareGPT's.
"""

from collections.abc import Callable

import numpy as np

Lengths = tuple[list[int], list[int]]


def _same(requests: int, n_in: int, n_out: int) -> Callable[[], Lengths]:
    return lambda: ([n_in] * requests, [n_out] * requests)


def _sharegpt_like(requests: int = 1000) -> Lengths:
    rng = np.random.default_rng(7)
    draws = [
        np.clip(rng.lognormal(mean, sigma, requests), 4, longest).astype(int).tolist()
        for mean, sigma, longest in ((4.6, 1.1, 2048), (4.8, 0.9, 1024))
    ]
    return draws[0], draws[1]


WORKLOADS: dict[str, Callable[[], Lengths]] = {
    "b1_128_256": _same(1, 128, 256),
    "b64_128_256": _same(64, 128, 256),
    "b256_128_256": _same(256, 128, 256),
    "sharegpt_like_1000": _sharegpt_like,
    "fixed_1024_128_x512": _same(512, 1024, 128),
    "prefill_2048_1_x128": _same(128, 2048, 1),
    # for a CPU
    "b1_32_128": _same(1, 32, 128),
    "b16_32_128": _same(16, 32, 128),
}
GPU_NAMES = list(WORKLOADS)[:6]
CPU_NAMES = list(WORKLOADS)[6:]


def lengths(name: str) -> Lengths:
    """Prompt and output lengths of workload `name`, in tokens. Raises ValueError for a name that is none."""
    if name not in WORKLOADS:
        raise ValueError(f"no workload is named {name!r}; there are {', '.join(WORKLOADS)}")
    return WORKLOADS[name]()


def prompts(input_lengths: list[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Token ids for each length."""
    rng = np.random.default_rng(seed)
    return [rng.integers(10, min(30000, vocab_size), size=n).tolist() for n in input_lengths]


def figures(seconds: float, input_lengths: list[int], output_lengths: list[int]) -> dict[str, float]:
    """What is reported of one run of a workload."""
    n_in, n_out = sum(input_lengths), sum(output_lengths)
    return {
        "requests": len(input_lengths),
        "seconds": round(seconds, 3),
        "output_tok_s": round(n_out / seconds, 1),
        "total_tok_s": round((n_in + n_out) / seconds, 1),
        "ms_per_step_at_least": round(1e3 * seconds / max(output_lengths), 3),
    }
