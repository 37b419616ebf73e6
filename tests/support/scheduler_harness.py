"""Scheduler and fake worker, connected as in the core, and the result that every request must get."""

from collections import deque

import numpy as np
from fake_worker import FakeWorker, solo_output
from kv_kinds import kinds_of

from quire.enginecore.adapters.giving import give
from quire.enginecore.adapters.registry import Adapter
from quire.enginecore.core import STEPS_OF_STAGE
from quire.enginecore.kv.sequence_blocks import SequenceBlocks
from quire.enginecore.scheduling.config import SchedulerConfig
from quire.enginecore.scheduling.scheduler import Scheduler
from quire.enginecore.scheduling.sequence import Sequence, SequenceState
from quire.enginecore.tasks.generate import GenerateTask
from quire.ipc.messages.frontend import sequence_key
from quire.ipc.sampling import SamplingParams
from quire.ipc.step.samples import Samples

VOCAB = 50


class Harness:
    """Scheduler and fake worker joined as the core joins them: up to two steps in flight a stage, results in order."""

    def __init__(
        self, *, num_blocks=40, block_size=4, windows=(0,), max_num_seqs=4, budget=16, max_model_len=64, eos=(), **more
    ):
        self.eos, self.windows = set(eos), windows
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            kv_groups=kinds_of(windows),
            eos_token_ids=tuple(eos),
            vocab_size=VOCAB,
            **more,
        )
        self.scheduler = Scheduler(self.config)
        self.worker = self.new_worker()
        self.in_flight: deque = deque()
        self.depth = STEPS_OF_STAGE * self.config.num_micro_batches
        self.now = 0.0  # seconds: a step's result comes each second
        self.outputs: dict[int, list[int]] = {}
        self.token_times: dict[int, list[float]] = {}  # name -> when each of its tokens came
        self.since_last: dict[int, list[float]] = {}  # name -> what the scheduler says of the time since the token before
        self.finished: dict[int, str] = {}
        self.sequences: dict[int, Sequence] = {}
        self.names: dict[int, int] = {}  # key -> name; a request's first child has its id for a name
        self.plans: list = []
        self.count = 0
        self.loading: list = []  # of adapters, as the scheduler has asked for them

    def new_worker(self):
        c = self.config
        return FakeWorker(
            c.max_num_seqs + 1, c.max_model_len // c.block_size + 1, c.block_size, self.windows, VOCAB, c.num_states > 0
        )

    def die(self):
        """The worker dies with the steps in flight, and another one comes. Returns what the scheduler has lost."""
        lost = self.scheduler.reset()
        self.scheduler.check()
        self.in_flight.clear()
        self.loading.clear()
        self.worker = self.new_worker()
        return lost

    def add(self, prompt, max_tokens=8, *, n=1, salt=b"", **more):
        """A request of n children, of the same root as Intake gives them; returns the first one's name."""
        own = b"" if self.config.enable_prefix_caching else str(self.count).encode()
        root, request_id = self.scheduler.kv.hasher.root(salt, own), self.count + 1
        for child in range(n):
            self._add_child(prompt, max_tokens, request_id, child, root, n=n, **more)
        return request_id

    def _add_child(
        self,
        prompt,
        max_tokens,
        request_id,
        child,
        root,
        *,
        n,
        priority=0,
        owner=0,
        tenant=None,
        ignore_eos=False,
        marks=(),
        adapter: Adapter | None = None,
        **params,
    ):
        self.count += 1
        p = SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=ignore_eos, **params)
        seq = Sequence(
            owner=owner,
            key=sequence_key(request_id, child),
            request_id=request_id,
            child=child,
            task=GenerateTask(p, frozenset(p.stop_token_ids or ())),
            prompt=np.asarray(prompt, np.int32),
            final_len=min(len(prompt) + max_tokens, self.config.max_model_len),
            seed=self.count,
            order=(priority, self.count),
            arrival_time=0.0,
            tenant=tenant,
            expected_output=max_tokens,
            blocks=SequenceBlocks(
                root, self.config.enable_prefix_caching or n > 1, may_hit=p.prompt_logprobs is None or child > 0, marks=marks
            ),
        )
        assert self.scheduler.fits(seq.final_len)
        if adapter is not None:
            give([seq], adapter, self.scheduler.kv.hasher)
            if seq.adapter is not None:
                self.scheduler.leases.adapters.want(adapter)
        self.sequences[self.count] = seq
        self.names[seq.key] = self.count
        self.outputs[self.count] = []
        self.scheduler.add(seq)

    def schedule(self):
        made = self.scheduler.schedule(now=1.0)
        self.scheduler.check()
        if made is not None:
            plan, step = made
            assert plan.num_tokens <= self.config.max_num_batched_tokens
            assert not len(plan.decode_rows) or bool(plan.lag) == (self.config.num_micro_batches > 1)
            self.plans.append(plan)
            words, first = self.worker.run(plan), self.worker.first_sample
            samples = Samples.of_windows(words, first) if plan.window > 1 else Samples.one_a_row(words)
            self.in_flight.append((step, samples))
            self._poison()
        return made

    def _poison(self):
        """States that no sequence holds are read no more: the worker asserts it."""
        for state in self.scheduler.kv.states.unused:
            self.worker.states.pop(state, None)

    def collect(self):
        step, samples = self.in_flight.popleft()
        self.now += 1.0
        out = self.scheduler.update(step, samples, self.now)
        self.scheduler.check()
        self._poison()
        t = self.scheduler.slots
        for slot in (s.slot for s in t.holders if s.state is SequenceState.DECODE):
            assert t.num_tokens[slot] <= t.sched_tokens[slot] <= t.sched_upper[slot]
            assert self.in_flight or t.num_tokens[slot] == t.sched_upper[slot], "all results are back"
        for key, token in zip(out.keys.tolist(), out.tokens.tolist(), strict=True):
            assert self.names[key] not in self.finished, "a token after the end"
            self.outputs[self.names[key]].append(token)
        rows = np.unique(out.rows, return_index=True)[1]
        for key, seconds in zip(out.keys[rows].tolist(), out.since_last.tolist(), strict=True):
            self.since_last.setdefault(self.names[key], []).append(seconds)
            self.token_times.setdefault(self.names[key], []).append(self.now)
        for _, f in out.finished:
            assert self.names[f.key] not in self.finished, "ended twice"
            self.finished[self.names[f.key]] = f.reason

    def adapters_turn(self, now=0.0):
        """As Adapters.turn: loads begin."""
        self.loading += self.scheduler.leases.adapters.turn(now, self.waits)

    def waits(self, adapter):
        return any(seq.adapter is adapter for seq in self.scheduler.waiting)

    def load(self, now=0.0):
        """The adapters that are loading are there."""
        loading, self.loading = self.loading, []
        for load in loading:
            self.worker.adapters[load.slot] = load.adapter.number
            self.scheduler.leases.adapters.loaded(load, now)
        return loading

    def defer(self, number, from_this_step_on):
        """Defer a sequence of the last step until its next mask; or, from_this_step_on, drop its row from that step, too."""
        step, t = self.in_flight[-1][0], self.scheduler.slots
        rows = (step.samples & t.alive[step.slots]).nonzero()[0].tolist()
        if from_this_step_on:  # masks are made when all tokens before are known
            rows = [row for row in rows if t.sched_tokens[step.slots[row]] - t.num_tokens[step.slots[row]] == 1]
        if rows:
            row = rows[number % len(rows)]
            if from_this_step_on:
                self.scheduler.drop_row(step, row)
            else:
                self.scheduler.defer(t.sequence(step.slots[row]))
            self.scheduler.check()

    def release(self, number):
        if deferred := [seq for seq in self.sequences.values() if seq.is_deferred]:
            self.scheduler.release(deferred[number % len(deferred)])
            self.scheduler.check()

    def turn(self, depth=None):
        """As the core's loop: fill the pipeline, then take the oldest result."""
        while len(self.in_flight) < (depth or self.depth) and self.schedule() is not None:
            pass
        if self.in_flight:
            self.collect()
            return True
        return False

    def run(self, depth=None, limit=10_000):
        for _ in range(limit):
            if not self.turn(depth):
                break
        assert self.scheduler.is_idle, "something is stuck"
        assert self.scheduler.kv.pool.num_used == 0 and self.scheduler.kv.states.num_used == 0

    def expected(self, name):
        seq = self.sequences[name]
        eos = set(seq.task.stop_ids) | (set() if seq.task.sampling.ignore_eos else self.eos)
        number = seq.adapter.number if seq.adapter is not None else 0
        return solo_output(seq.prompt.tolist(), seq.final_len, eos, VOCAB, number, seq.adapter_from)

    def assert_right(self):
        for name in self.finished:
            assert self.outputs[name] == self.expected(name), f"request {name} got other tokens than alone"
