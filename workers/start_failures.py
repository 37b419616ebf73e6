"""Why a worker could not start, in one line for the operator: the model, a flag, or the machine is at fault.

worker.py sends this line to the core, which ends the start. Any other error is a bug and is raised with its traceback.
"""

import logging

import torch

from quire.kernels.tuning.current import TuningError
from quire.workers.loading.weight_loader import WeightsError
from quire.workers.logits_processors.load import ProcessorError
from quire.workers.memory import OutOfMemory
from quire.workers.models.config import ModelConfigError

log = logging.getLogger("quire.workers")

_OF_THE_OPERATOR = (ModelConfigError, WeightsError, TuningError, ProcessorError, OutOfMemory, torch.OutOfMemoryError, OSError)


def in_words(error: Exception) -> str | None:
    """The line for the operator; None for a bug."""
    if isinstance(error, _OF_THE_OPERATOR):
        return str(error)
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # torch's, on a CPU: a RuntimeError
        return (
            f"the host's memory does not suffice ({_reason(error)}): a smaller KV cache (--cpu-kv-cache-gib), fewer tokens a "
            "step (--max-num-batched-tokens) or a higher limit of the process (ulimit -v) may help"
        )
    if type(error).__module__.startswith("triton."):
        log.error("a kernel cannot be compiled", exc_info=error)
        return f"a kernel cannot be compiled for this GPU: {_reason(error)}"
    return None


def _reason(error: BaseException) -> str:
    """The innermost cause in one line, without the caret or the failed command at the end of Triton's own errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^~") and not line.startswith("Repro command")]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
