"""How a model is laid out over workers: which sizes are possible, and which layers a stage has.

Sizes are fields of EngineConfig, which checks them here (config.py). Workers and `quire estimate` assign layers to stages by
`split_layers`.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

MAX_RANKS = 64  # of one model
MAX_ENGINES = 64  # of --data-parallel-size


def check_layout(config: Any) -> None:
    """Check the sizes of an EngineConfig. Raises ValueError, naming the flag, for sizes that can never work."""

    def need(ok: bool, what: str) -> None:
        if not ok:
            raise ValueError(what)

    need(1 <= config.tensor_parallel_size <= MAX_RANKS, f"--tensor-parallel-size must be between 1 and {MAX_RANKS}")
    need(1 <= config.pipeline_parallel_size <= MAX_RANKS, f"--pipeline-parallel-size must be between 1 and {MAX_RANKS}")
    need(
        config.world_size <= MAX_RANKS,
        f"--tensor-parallel-size {config.tensor_parallel_size} times --pipeline-parallel-size {config.pipeline_parallel_size} "
        f"must be at most {MAX_RANKS}",
    )
    need(0.1 <= config.collective_timeout_s <= 86400, "--collective-timeout-s must be between 0.1 and 86400")
    need(1 <= config.emulate_world_size <= MAX_RANKS, f"--emulate-world-size must be between 1 and {MAX_RANKS}")
    need(
        config.emulate_world_size == 1 or (config.load_format == "dummy" and config.world_size == 1),
        "--emulate-world-size runs one rank alone, whose answers mean nothing: it needs --load-format dummy, and "
        "--tensor-parallel-size and --pipeline-parallel-size 1",
    )
    need(1 <= config.data_parallel_size <= MAX_ENGINES, f"--data-parallel-size must be between 1 and {MAX_ENGINES}")
    need(
        config.data_parallel_size == 1 or config.tensor_parallel_size > 1 or not config.enable_expert_parallel,
        "--enable-expert-parallel distributes experts over the ranks of --tensor-parallel-size, which is 1: over engines "
        "of --data-parallel-size they are not distributed (attention of each engine's own, tokens sent to experts all-to-all); "
        f"use --tensor-parallel-size {config.data_parallel_size} --enable-expert-parallel instead, or leave the flag out",
    )


def split_layers(first: int, layers: Sequence[int], last: int, count: int) -> list[range]:
    """Assign layers to stages, at least one to each, so that the sum of the stages' squared bytes is least (nearly even).

    layers: bytes of each. first, last: more bytes of the first and of the last stage (embedding, head).
    """
    total = [0]
    for num_bytes in layers:
        total.append(total[-1] + num_bytes)
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}  # layers assigned -> (cost, the ends of their stages)
    for stage in range(count):
        more = (first if stage == 0 else 0) + (last if stage == count - 1 else 0)
        ends = range(stage + 1, len(layers) - (count - stage - 1) + 1)
        best = {
            end: min(
                (cost + (total[end] - total[begin] + more) ** 2, (*cuts, end))
                for begin, (cost, cuts) in best.items()
                if begin < end
            )
            for end in ends
        }
    _, cuts = best[len(layers)]
    return [range(begin, end) for begin, end in pairwise((0, *cuts))]
