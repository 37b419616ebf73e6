"""The sizes of a rank's share of a model, for `quire estimate`: a worker's code counts them in a process of its own.

So every family is counted as it is built, including experts and latent caches (workers/sizes.py), and the command itself
imports no torch. It takes some seconds, mostly to import torch; a model is counted once for each number of ranks.
"""

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from quire.ipc.config import EngineConfig
from quire.ipc.lora_flags import limits_of, parse_module
from quire.ipc.memory_plan import AdaptersAsked, CpuAsked, RankSizes, SizesAsked

TIMEOUT_S = 300.0
SIZES_MODULE = "quire.workers.sizes"

Json = dict[str, Any]


class EstimateError(ValueError):
    """No estimate can be made; the text is for the user."""


def sizes_on_rank(
    name: str, config: Json, size: int = 1, *, expert_parallel: bool = False, is_of_mtp: bool = False
) -> RankSizes:
    """Sizes of the largest of `size` ranks; weights are counted as if not quantized. Raises EstimateError.

    is_of_mtp: of the layers that predict further tokens.
    """
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "compression_config")}
    answer = _answer(msgspec.json.encode(SizesAsked(plain, size, expert_parallel, is_of_mtp=is_of_mtp)))
    if not isinstance(answer, RankSizes):
        raise EstimateError(f"{name}: {answer}")
    return answer


def cpu_weights_bytes(name: str, config: Json, cpu: CpuAsked, size: int = 1, *, expert_parallel: bool = False) -> int:
    """Bytes of the weights of a worker on a CPU, by the function that it checks them with itself. Raises EstimateError."""
    answer = _answer(msgspec.json.encode(SizesAsked(config, size, expert_parallel, cpu)))
    if not isinstance(answer, int):
        raise EstimateError(f"{name}: {answer}")
    return answer


def adapters_bytes(config: Json | None, engine: EngineConfig, dtype: str) -> int:
    """Bytes of all adapter slots of a rank; 0 without --enable-lora. config: the model's. Raises EstimateError.

    Adapters of --lora-modules that are folders here are read, as a slot holds what they have. Hub ids are not.
    """
    if not engine.enable_lora or config is None:
        return 0
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "compression_config")}
    paths = [parse_module(text).path for text in engine.lora_modules]
    adapters = AdaptersAsked(limits_of(engine), dtype, [path for path in paths if Path(path).is_dir()])
    asked = SizesAsked(plain, engine.tensor_parallel_size, engine.enable_expert_parallel, adapters=adapters)
    answer = _answer(msgspec.json.encode(asked))
    if not isinstance(answer, int):
        raise EstimateError(f"--enable-lora: {answer}")
    return -(-answer // engine.pipeline_parallel_size)  # a stage has its own layers' slots


@functools.lru_cache(maxsize=16)
def _answer(asked: bytes) -> RankSizes | int | str:
    command = [sys.executable, "-P", "-m", SIZES_MODULE]
    try:
        done = subprocess.run(command, input=asked, capture_output=True, timeout=TIMEOUT_S)
        return msgspec.json.decode(done.stdout, type=RankSizes | int | str)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EstimateError(f"its layers cannot be counted: {error}") from None
    except msgspec.DecodeError:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["no answer"])[-1]
        raise EstimateError(f"its layers cannot be counted: {last}") from None
