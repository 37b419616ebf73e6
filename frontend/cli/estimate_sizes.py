"""The sizes of a rank's share of a model, for `quire estimate`: a worker's code counts them in a process of its own.

So every family is counted as it is built, including experts and latent caches (workers/sizes.py), and the command itself
imports no torch. It takes some seconds, mostly to import torch; a model is counted once for each number of ranks.
"""

import functools
import subprocess
import sys
from typing import Any

import msgspec

from quire.ipc.memory_plan import RankSizes, SizesAsked

TIMEOUT_S = 300.0
SIZES_MODULE = "quire.workers.sizes"

Json = dict[str, Any]


class EstimateError(ValueError):
    """No estimate can be made; the text is for the user."""


def sizes_on_rank(name: str, config: Json, size: int = 1, *, expert_parallel: bool = False) -> RankSizes:
    """Sizes of the largest of `size` ranks; weights are counted as if not quantized. Raises EstimateError."""
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "compression_config")}
    answer = _answer(msgspec.json.encode(SizesAsked(plain, size, expert_parallel)))
    if isinstance(answer, str):
        raise EstimateError(f"{name}: {answer}")
    return answer


@functools.lru_cache(maxsize=16)
def _answer(asked: bytes) -> RankSizes | str:
    command = [sys.executable, "-P", "-m", SIZES_MODULE]
    try:
        done = subprocess.run(command, input=asked, capture_output=True, timeout=TIMEOUT_S)
        return msgspec.json.decode(done.stdout, type=RankSizes | str)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EstimateError(f"its layers cannot be counted: {error}") from None
    except msgspec.DecodeError:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["no answer"])[-1]
        raise EstimateError(f"its layers cannot be counted: {last}") from None
