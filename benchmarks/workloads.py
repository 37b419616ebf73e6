"""The offline workloads, the same for every engine: lengths of prompts and outputs, and the prompts' token ids.

Ids are drawn from [10, 30000) (or up to the vocabulary's end, if that is smaller), end-of-sequence is ignored and the
temperature is 1.0, so every engine generates exactly the requested number of output tokens. `sharegpt_like` draws lognormal
lengths like ShareGPT's.

The workloads of `PREFIX_WORKLOADS` repeat prompts, and are the only ones that run with prefix caching. A prompt of
`shared_prefix_2000_x512` has 2,000 ids in common with all 512 requests, and 64 of its own; an answer has 64. In
`conversations_64x8_300` each turn adds 236 ids to a conversation and asks for 64: its prompt is the whole conversation so far,
including the engine's own answers, so it grows by 300 per turn. `agent_35_2300` is one conversation that grows to 80,500 ids.
"""

from collections.abc import Callable
from dataclasses import dataclass

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
    # for models with recurrent layers
    "prefill_3000_1_x32": _same(32, 3000, 1),
    # for 8-bit caches
    "b8_7000_200": _same(8, 7000, 200),
}
GPU_NAMES = list(WORKLOADS)[:6]
CPU_NAMES = list(WORKLOADS)[6:8]


@dataclass(frozen=True)
class PrefixWorkload:
    """`conversations` in parallel, each with `turns`; a turn adds `new` ids and gets an answer of `answer` tokens."""

    conversations: int
    turns: int
    shared: int  # ids that all conversations begin with
    new: int
    answer: int

    @property
    def input_lengths(self) -> list[int]:
        """The prompts' lengths in all turns, whether or not an engine finds them in its cache."""
        grown = [self.shared + self.new + turn * (self.answer + self.new) for turn in range(self.turns)]
        return [n for n in grown for _ in range(self.conversations)]

    @property
    def output_lengths(self) -> list[int]:
        return [self.answer] * (self.conversations * self.turns)


PREFIX_WORKLOADS: dict[str, PrefixWorkload] = {
    "shared_prefix_2000_x512": PrefixWorkload(512, turns=1, shared=2000, new=64, answer=64),
    "conversations_64x8_300": PrefixWorkload(64, turns=8, shared=0, new=236, answer=64),
    "agent_35_2300": PrefixWorkload(1, turns=35, shared=0, new=2000, answer=300),
    # for a CPU
    "agent_5_140": PrefixWorkload(1, turns=5, shared=0, new=128, answer=12),
    "shared_prefix_400_x16": PrefixWorkload(16, turns=1, shared=400, new=16, answer=16),
    "conversations_4x4_60": PrefixWorkload(4, turns=4, shared=0, new=48, answer=12),
}
PREFIX_GPU_NAMES = list(PREFIX_WORKLOADS)[:2]
NAMES = [*WORKLOADS, *PREFIX_WORKLOADS]


def lengths(name: str) -> Lengths:
    """Prompt and output lengths of workload `name`, in tokens. Raises ValueError for an unknown name."""
    if name not in WORKLOADS:
        raise ValueError(f"no workload is named {name!r}; there are {', '.join(WORKLOADS)}")
    return WORKLOADS[name]()


def prompts(input_lengths: list[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Token ids for each length."""
    rng = np.random.default_rng(seed)
    return [rng.integers(10, min(30000, vocab_size), size=n).tolist() for n in input_lengths]


def opening(workload: PrefixWorkload, vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts of the first turn. Another seed gives prompts without a common prefix with these."""
    (shared,) = prompts([workload.shared], vocab_size, seed)
    return next_turn(workload, [shared] * workload.conversations, vocab_size, seed + 1_000)


def next_turn(workload: PrefixWorkload, said: list[list[int]], vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts of the next turn; `said`: each conversation so far, prompts and answers."""
    added = prompts([workload.new] * workload.conversations, vocab_size, seed)
    return [before + new for before, new in zip(said, added, strict=True)]


def figures(seconds: float, input_lengths: list[int], output_lengths: list[int], turns: int = 1) -> dict[str, float]:
    """The reported figures of one run of a workload."""
    n_in, n_out = sum(input_lengths), sum(output_lengths)
    return {
        "requests": len(input_lengths),
        "seconds": round(seconds, 3),
        "output_tok_s": round(n_out / seconds, 1),
        "total_tok_s": round((n_in + n_out) / seconds, 1),
        "ms_per_step_at_least": round(1e3 * seconds / (turns * max(output_lengths)), 3),
    }
