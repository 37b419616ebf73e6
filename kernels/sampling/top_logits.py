"""The likeliest tokens of each row of logits, for log-probabilities; and the sum of a row's exponentials in one order.

torch chooses freely among equal logits, and splits a sum by the number of rows. With `--deterministic` the first of equals
comes first, and a row's sum has one order. Called by `sampler` and, for prompts, by `sampler_cpu`.
"""

import torch

from quire.kernels.tuning.current import current


def top_logits(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, ids int64) [R, count] of the largest logits [R, V], in descending order."""
    if not current().fixed_order:
        return logits.topk(count, dim=1)  # type: ignore[return-value]
    bits, last = logits.float().view(torch.int32), logits.shape[1] - 1
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # as integers that sort as the logits do
    keys = (ordered << 32) | (last - torch.arange(last + 1, device=logits.device))
    ids = last - (keys.topk(count, dim=1).values & 0xFFFFFFFF)
    return logits.gather(1, ids), ids


def log_sum_exp(x: torch.Tensor) -> torch.Tensor:
    """log(sum(exp(x))) of rows x float32 [N, V]: [N, 1]."""
    if not current().fixed_order:
        return x.logsumexp(-1, keepdim=True)
    top = x.amax(1, keepdim=True)  # exact in any order
    sums = (x - top).exp_()
    while sums.shape[1] > 1:  # halves are added element by element
        half = -(-sums.shape[1] // 2)
        low, high = sums[:, :half], sums[:, half:]
        sums = low + torch.nn.functional.pad(high, (0, half - high.shape[1]))
    return top + sums.log()
