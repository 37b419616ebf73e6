"""How likely each slot's drafts are to be accepted: what a step's drafts are shared out by. No triton here.

A slot's row has two parts of MAX_WINDOW numbers, in 1 / ONE:

    acceptance  by place: a running mean of whether a draft there, behind right ones, was right; FIRST for a new sequence
    survival    by place: the product of the acceptances up to it

A draft of low survival may get no place in a step, and would never be tried again, so what is not tested slowly goes back to
FIRST. Behind the slots' rows are that of a new sequence, and BOUNDS: the histogram's bins, by which a threshold of survival is
found in one pass over the rows (windows.py). All are integers, so every rank and device shares alike.
"""

import numpy as np
import torch

from quire.ipc.step.sections import MAX_DRAFTS, MAX_WINDOW

ONE, ONE_BITS = 1024, 10
FIRST = 716  # 0.7: a draft's acceptance while nothing is known
SLOW_BITS = 3  # a running mean of about 8 drafts
BINS = 2 * MAX_WINDOW
_BY_BIN = 2 ** (-1 / 4)  # neighboring bounds, down to the fifteenth place of a new sequence
BOUNDS = np.array([2 * ONE, *(int(ONE * _BY_BIN**i) for i in range(1, BINS - 1)), 0], np.int32)  # falling


def survival_of(acceptance: np.ndarray) -> np.ndarray:
    """The product up to each place, int32 [n, MAX_WINDOW]."""
    found, product = np.zeros_like(acceptance), np.full(len(acceptance), ONE, np.int32)
    for place in range(MAX_DRAFTS):
        product = product * acceptance[:, place] >> ONE_BITS
        found[:, place] = product
    return found


def new_survival(slots: int, device: torch.device | str) -> torch.Tensor:
    """int32 [slots + 2, 2 * MAX_WINDOW]."""
    first = np.full((1, MAX_WINDOW), FIRST, np.int32)
    row = np.concatenate([first, survival_of(first)], 1)
    return torch.from_numpy(np.concatenate([row.repeat(slots + 1, 0), BOUNDS[None]])).to(device)


def observe_cpu(survival: np.ndarray, slots: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
    """Learn from a step's decode rows.

    int [rows]: their slots, the drafts of each, and how many samples of each count, the last of which is no draft; 0 of a row
    that does not count.
    """
    acceptance, places = survival[slots, :MAX_WINDOW], np.arange(MAX_WINDOW)
    tested = (places < drafted[:, None]) & (places < accepted[:, None])
    seen = np.where(places < accepted[:, None] - 1, ONE, 0)
    learnt = acceptance + (seen - acceptance >> SLOW_BITS)
    acceptance = np.where(tested, learnt, acceptance + (acceptance < FIRST)).astype(np.int32)
    survival[slots] = np.concatenate([acceptance, survival_of(acceptance)], 1)
