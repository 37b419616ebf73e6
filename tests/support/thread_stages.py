"""A model's pipeline stages as threads of the test's process, each working on another step; and an engine with plans for them.

As in workers, a rank takes one plan after the other and waits only for its inputs. A stage's ranks exchange as in
thread_ranks.py, where their tokens are compared; here only those of the last stage's first rank count.
"""

import queue
from concurrent.futures import ThreadPoolExecutor

import torch
from inline_engine import InlineEngine
from thread_ranks import TIMEOUT_S, RankOfThreads, Threads

from quire.ipc.step.sections import STEP_MASK
from quire.workers.expert_load import expert_load_of
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel
from quire.workers.pipeline import max_in_flight
from quire.workers.stages import stage_of


class Wires:
    """What travels between the stages, of one row of ranks."""

    def __init__(self, count):
        self.hidden = [queue.Queue() for _ in range(count)]  # by the stage that receives
        self.tokens = queue.Queue()


class LinksOfThreads:
    def __init__(self, wires, stage):
        self.wires, self.stage = wires, stage

    def send_hidden(self, x):
        self.wires.hidden[self.stage.index + 1].put(x.clone())

    def receive_hidden(self, out):
        out.copy_(self.wires.hidden[self.stage.index].get(timeout=TIMEOUT_S))

    def send_tokens(self, x):
        self.wires.tokens.put(x.clone())

    def receive_tokens(self, n):
        received = self.wires.tokens.get(timeout=TIMEOUT_S)
        assert len(received) == n
        return received


def step_once(runner, words, read_masks):
    """As in InlineEngine.run, a plan's words are others' once it has been taken."""
    results = runner.step(words, read_masks)
    words.fill(-1)
    return results


class Stages:
    """In a ModelRunner's place: a thread for every rank."""

    def __init__(self, runners):
        self.runners = runners  # by stage, then by rank
        self.threads = [ThreadPoolExecutor(1) for _ in runners]
        self.steps = {}  # number -> futures
        self.last = runners[-1]

    def step(self, words, read_masks):
        with_masks = [
            thread.submit(step_once, r, words.copy(), read_masks) for r, thread in zip(self.runners, self.threads, strict=True)
        ]
        self.steps[int(words[0])] = with_masks
        return []

    def take(self, number):
        """Wait for a step; what it yields beside its tokens."""
        *_, last = [future.result(timeout=2 * TIMEOUT_S) for future in self.steps.pop(number)]
        return last

    def __getattr__(self, name):
        return getattr(self.last, name)


class EngineOfStages(InlineEngine):
    def _results(self, step):
        self.prompt_rows += self.runner.take(step.step & STEP_MASK)
        return super()._results(step)


def engine_of_stages(folder, stages, size=1, links=LinksOfThreads, expert_parallel=False, **options):
    """An InlineEngine of so many stages, of `size` ranks each. links(wires, stage): a rank's, in place of LinksOfThreads."""
    config = read_model_config(folder)
    wires, engines = [Wires(stages) for _ in range(size)], []
    for index in range(stages):
        stage, group = stage_of(config, torch.float32, index, stages), Threads(size)
        for rank in range(size):
            exchange = RankOfThreads(group, rank) if size > 1 else None
            parallel = Parallel(rank, size, exchange=exchange, stage=stage, expert_parallel=expert_parallel)
            parallel.expert_load = expert_load_of(config, parallel)
            engine = EngineOfStages(folder, parallel=parallel, depth=max_in_flight(stages), **options)
            engine.runner.join(links(wires[rank], stage))
            engines.append(engine)
    first = engines[0]
    first.engines = engines
    first.runner = Stages([engine.runner for engine in engines])
    return first
