"""A model's ranks as threads of the test's process: their exchange, and an engine that runs every step on all of them."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from deadlines import DEADLINE_S
from inline_engine import InlineEngine

from quire.kernels.elementwise import norm_reference
from quire.workers.expert_load import ExpertLoad
from quire.workers.parallel import Parallel

TIMEOUT_S = DEADLINE_S


class Threads:
    """An exchange between threads. Sums are formed in the order of the ranks, so all ranks have the same bits."""

    def __init__(self, size):
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self.given = [None] * size
        self.sums = self.gathers = self.norms = 0

    def rank(self, rank):
        return RankOfThreads(self, rank)


class RankOfThreads:
    def __init__(self, group, rank):
        self.group, self.rank = group, rank

    def exchange(self, x):
        self.group.given[self.rank] = x
        self.group.barrier.wait()
        everyone = list(self.group.given)
        self.group.barrier.wait()
        return everyone

    def all_reduce(self, x):
        self.group.sums += self.rank == 0
        return sum(self.exchange(x))

    def all_gather(self, x):
        self.group.gathers += self.rank == 0
        return torch.stack(self.exchange(x))

    def close(self):
        pass

    def add_rms_norm(self, x, residual, weight, eps):
        """As a GPU's kernel does."""
        self.group.norms += self.rank == 0
        return norm_reference.add_rms_norm(sum(self.exchange(x)), residual, weight, eps)


def on_every_rank(size, run, **options):
    """run(parallel) of each rank at the same time -> (results, the group); options are Parallel's."""
    group = Threads(size)
    with ThreadPoolExecutor(size) as pool:
        ranks = [Parallel(rank, size, exchange=group.rank(rank), **options) for rank in range(size)]
        futures = [pool.submit(run, rank) for rank in ranks]
        return [future.result(timeout=2 * TIMEOUT_S) for future in futures], group


class Together:
    """In a ModelRunner's place: the runners of all ranks, each step in threads of their own. Their tokens must be the same."""

    def __init__(self, runners):
        self.runners = runners
        self.first = runners[0]
        self._pool = ThreadPoolExecutor(len(runners))

    def step(self, words, read_masks):
        steps = [self._pool.submit(runner.step, words.copy(), read_masks) for runner in self.runners]
        results = [step.result(timeout=2 * TIMEOUT_S) for step in steps]
        for runner in self.runners[1:]:
            assert torch.equal(runner.device.results, self.first.device.results), "ranks have sampled different tokens"
        return results[0]

    def __getattr__(self, name):
        return getattr(self.first, name)


def engine_of_ranks(folder, size, exchange=None, for_norms=False, expert_parallel=False, **options):
    """An InlineEngine of so many ranks. exchange(group, rank): what a rank exchanges by, in place of RankOfThreads.

    for_norms: sums are formed with the norms behind them. expert_parallel: the first rank counts, too."""
    if size == 1:
        return InlineEngine(folder, **options)
    group, make = Threads(size), exchange or Threads.rank
    exchanges = [make(group, rank) for rank in range(size)]
    ranks = [
        Parallel(rank, size, exchange=e, norm_exchange=e if for_norms else None, expert_parallel=expert_parallel)
        for rank, e in enumerate(exchanges)
    ]
    if expert_parallel:
        ranks[0].expert_load = ExpertLoad(size, torch.device("cpu"))
    first, *others = (InlineEngine(folder, parallel=rank, **options) for rank in ranks)
    first.group = group
    first.runner = Together([first.runner, *(other.runner for other in others)])
    return first
