"""An encoder that fails: the requests that need the item end, all others are answered, and nothing wrong is left in a cache."""

import pytest
import tiny_wrappers
import torch
from media_engine import MediaEngine, image_of, item_of, prompt, reference, square_of

from quire.enginecore.failed_items import TEXTS, failed_by
from quire.ipc.messages.workers import ItemFailed
from quire.ipc.sampling import SamplingParams

TEXT = [5, 81, 300, 17, 222, 4, 99, 410, 37, 51, 6, 7, 8, 144, 290, 333, 21]
BAD = image_of(3, 5)
AT_RESULTS = 10**6
BAD_SQUARE = square_of(1)  # for models that take squares
BAD_DIGESTS = [item_of(image, 0)[0].digest for image in (BAD, BAD_SQUARE)]


def prompts_of(bad, good, other):
    return {
        "text": [TEXT],
        "bad": [TEXT, bad, TEXT[::-1]],
        "good": [TEXT, good, TEXT],
        "bad behind good": [other, TEXT, bad],
        "bad again": [TEXT, bad, TEXT[::-1], TEXT],
        "long text": [TEXT * 5],
    }


PROMPTS = prompts_of(BAD, image_of(2, 2), image_of(2, 3))
SQUARES = prompts_of(BAD_SQUARE, square_of(2), square_of(3))


def breaks(fault):
    """The encoder's fault with the bad image's tensors. fault: as in ItemFailed, or "shape"."""

    def run(rows):
        if fault == "memory":
            raise torch.OutOfMemoryError("no room for /secret")
        if fault == "error":
            raise ValueError("size mismatch")
        return rows[1:] if fault == "shape" else torch.full_like(rows, float("nan"))

    return run


class FailingEngine(MediaEngine):
    """late: calls of the scheduler between a failed run and the message about it; None: it comes right before the results of
    the step with the run, the latest time at which the core gets it (encoded_steps.py)."""

    def __init__(self, name, fault, late=0, **more):
        super().__init__(tiny_wrappers.wrapped(name), rows=64, **more)
        self.late = AT_RESULTS if late is None else late
        self.broken, self.failed, self.faults, self._told = True, {}, set(), []
        self.model.items.guarded.report = lambda number, fault: self._told.append([self.late, ItemFailed(0, number, fault)])
        encode, schedule = self.model.items.encode, self.scheduler.schedule

        def failing(arrived):
            rows = encode(arrived)
            if self.broken and any(item.item.digest in BAD_DIGESTS for item in arrived):
                return breaks(fault)(rows)
            return rows

        def told(now=0.0):
            self.model.items.guarded.settle()  # as a worker does behind each step
            self._tell(1)
            return schedule(now)

        self.model.items.encode, self.scheduler.schedule = failing, told

    def _tell(self, calls):
        for waits in list(self._told):
            waits[0] -= calls
            if waits[0] < 0:
                self._told.remove(waits)
                self._fail(waits[1])

    def _results(self, step):
        if step.has_runs and self.late == AT_RESULTS:
            self.model.items.guarded.settle()
            self._tell(AT_RESULTS + 1)
        return super()._results(step)

    def _fail(self, message):
        self.faults.add(message.fault)
        assert message.fault in TEXTS
        for owner, request_id, code, text in failed_by(message, self.scheduler):
            assert self.scheduler.abort(owner, request_id) and code == "media_failed"
            self.failed[request_id] = text
        assert failed_by(message, self.scheduler) == []  # as another rank says of the same run
        self.scheduler.check()

    def ask(self, prompts, count=12):
        """By name: the tokens, or None for requests that have failed."""
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        ids = {name: self.add(prompt(*parts), params) for name, parts in prompts.items()}
        outputs = self.run()
        return {name: None if id in self.failed else outputs[id << 8] for name, id in ids.items()}


@pytest.mark.parametrize("late", [0, 1, 3, None])
@pytest.mark.parametrize("fault", ["memory", "error", "shape", "not_finite"])
@pytest.mark.parametrize("name", ["qwen3-vl-seen", "qwen3.5-seen"])
def test_requests_that_need_a_failed_item_end_alone(name, fault, late):
    want = {key: reference(name, parts, 12) for key, parts in PROMPTS.items()}
    engine = FailingEngine(name, fault, late, budget=32)
    answers = engine.ask(PROMPTS)
    assert answers == {key: None if "bad" in key else tokens for key, tokens in want.items()}
    assert engine.faults == {"error" if fault == "shape" else fault}
    engine.broken = False
    assert engine.ask(PROMPTS) == want  # no block, state or row of the failed run is found
    assert engine.ask(PROMPTS) == want


SLOW = [pytest.param(name, late, marks=pytest.mark.slow) for name in ("gemma3-seen", "gemma3-narrow-seen") for late in (1, 3)]
QUICK = [("gemma3-narrow-seen", 0), ("gemma3-seen", None)]
OTHERS = [pytest.param(name, late, marks=pytest.mark.slow) for late, name in ((0, "gemma3-seen"), (None, "gemma3-narrow-seen"))]


@pytest.mark.parametrize(("name", "late"), [*QUICK, *SLOW, *OTHERS])
def test_nothing_wrong_is_left_in_blocks_that_a_window_has_given_back(name, late):
    prompts = {**SQUARES, "bad for long": [BAD_SQUARE, *[TEXT] * 5]}
    want = {key: reference(name, parts, 12) for key, parts in prompts.items()}
    engine = FailingEngine(name, "memory", late, budget=11, is_whole=True, block_size=4)
    for key, parts in prompts.items():
        assert engine.ask({key: parts}) == {key: None if "bad" in key else want[key]}
    engine.broken = False
    shorter = {f"{key} to {end}": (key, end) for key in prompts for end in (1, 2)}
    for _ in range(2):
        for key, parts in prompts.items():
            assert engine.ask({key: parts}) == {key: want[key]}
        for key, end in shorter.values():  # hits what is in the middle of a longer one
            parts = prompts[key][:end]
            assert engine.ask({key: parts}) == {key: reference(name, parts, 12)}


def test_a_request_of_one_token_fails_with_its_only_step():
    engine = FailingEngine("qwen3-vl-seen", "memory", late=None)
    assert engine.ask({"bad": PROMPTS["bad"], "good": PROMPTS["good"]}, count=1)["bad"] is None


def test_settling_says_whether_there_was_a_run():
    engine = MediaEngine(tiny_wrappers.wrapped("qwen3-vl-seen"))
    settle = engine.model.items.guarded.settle
    assert not settle()
    engine.generate([prompt(TEXT, BAD)], SamplingParams(max_tokens=2))
    assert settle() and not settle()


def test_items_of_a_failed_batch_are_encoded_alone():
    name = "qwen3-vl-seen"
    engine = FailingEngine(name, "error", budget=512)
    parts = {"together": [image_of(2, 2), image_of(2, 3), BAD], "beside": [image_of(1, 3), TEXT]}
    assert engine.ask(parts) == {"together": None, "beside": reference(name, parts["beside"], 12)}
    assert len(engine.failed) == 1
    again = [image_of(2, 2), image_of(2, 3), TEXT]
    runs = engine.runs
    assert engine.ask({"again": again}) == {"again": reference(name, again, 12)}
    assert engine.runs == runs  # the good items of the batch have their rows


def test_children_end_together_and_rows_are_all_free():
    engine = FailingEngine("qwen3-vl-seen", "memory")
    request = engine.add(prompt(TEXT, BAD), SamplingParams(max_tokens=8, n=3, ignore_eos=True))
    engine.run()
    assert list(engine.failed) == [request] and "ran out of memory" in engine.failed[request]
    cache = engine.scheduler.items.cache
    assert cache.allocate(b"x" * 32, 64, 1000) is not None  # all rows
    cache.check()


def test_an_error_of_the_device_ends_the_worker():
    engine = FailingEngine("qwen3-vl-seen", "error")

    def lost(arrived):
        raise torch.AcceleratorError("the device is lost")

    engine.model.items.encode = lost
    with pytest.raises(torch.AcceleratorError):
        engine.ask({"bad": PROMPTS["bad"]})
