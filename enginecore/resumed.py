"""Requests that ran on an engine that was lost, and go on here: their sequences begin with the outputs that they had.

Such a sequence is like a preempted one: its tokens are known and computed again, and everything that depends on a position goes
on from there. Its grammar is given the outputs when it is prepared (grammar/compiler.py). Called by intake, which checks the
rest of the request.
"""

import numpy as np

from quire.enginecore.refusal import Refused
from quire.enginecore.scheduling.sequence import Sequence
from quire.ipc.messages.frontend import Generate


def outputs_so_far(task: Generate, most: int, vocab_size: int) -> dict[int, np.ndarray]:
    """The outputs, int32 ids, of each child that goes on, by its number; empty for a new request. Raises Refused.

    most: the length of an output that ends by length, which such a child has not reached."""
    resume = task.resume
    if resume is None:
        return {}
    if task.candidates is not None:
        raise Refused("invalid", "a step of a beam search cannot be resumed")
    if len(resume.outputs) != task.params.n or all(output is None for output in resume.outputs):
        raise Refused("invalid", f"resume must hold {task.params.n} outputs, one for each child, and not only None")
    if resume.seed is not None and not 0 <= resume.seed < 1 << 64:
        raise Refused("invalid", "resume.seed must fit 64 bits")
    outputs = {}
    for child, output in enumerate(resume.outputs):
        if output is None:
            continue
        if len(output) % 4:
            raise Refused("invalid", "an output of resume must consist of int32")
        ids = np.frombuffer(output, np.int32)
        if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
            raise Refused("invalid", f"an output of resume holds a token id outside the vocabulary of {vocab_size}")
        if len(ids) >= most:
            raise Refused("engine_error", f"the request has {len(ids)} output tokens, and this engine has room for {most}")
        outputs[child] = ids
    return outputs


def go_on(seq: Sequence, output: np.ndarray) -> None:
    """Let a new sequence go on after this output."""
    if not len(output):
        return
    seq.tokens = np.concatenate([seq.prompt, output])
    seq.num_cached_tokens = 0  # the engine that was lost has counted the prompt, and sent its logprobs
    seq.num_scored = len(seq.prompt)
