"""Which samples of a step with windows count: the CPU worker's path and the oracle of `accept`."""

import numpy as np
import torch

from quire.ipc.step.sections import NO_TOKEN, REJECTED
from quire.kernels.step.tables import StepBuffers


def accept(step: StepBuffers, sampled: torch.Tensor, num_rows: int) -> None:
    """Write step.accepted [num_rows], how many samples of each row count, and REJECTED over the others in `sampled`, int32 [N].

    A decode row's first sample counts if the row samples. A later one counts if the one before it does and is the draft at its
    place, so that the model has computed the right token there, unless it is NO_TOKEN: where nothing may follow the draft, or
    what may is not known, the row's next step begins. NO_TOKEN is no draft's id. A prefill row has one sample, which stays as
    it is, and counts if the row samples.
    """
    out, tokens = step.host, sampled.numpy()
    decode, rows = int(out["num_decode_rows"][0]), int(out["num_rows"][0])
    accepted, begin = out["accepted"], out["query_start"][:decode]
    end = int(out["query_start"][decode])
    places = out["sample_places"][:end]
    accepted[:rows], accepted[rows:num_rows] = out["samples"][:rows], 0
    if not decode:
        return
    wrong = places > 0
    wrong[1:] &= (tokens[: end - 1] != out["input_ids"][1:end]) | (tokens[1:end] == NO_TOKEN)
    counts = np.minimum.reduceat(np.where(wrong, places, out["row_tokens"][:decode].repeat(out["row_tokens"][:decode])), begin)
    accepted[:decode] *= counts
    tokens[:end][places >= accepted[:decode].repeat(out["row_tokens"][:decode])] = REJECTED
