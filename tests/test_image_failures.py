"""An encoder that fails: the requests that need the item end, all others are answered, and nothing wrong is left in a cache."""

import pytest
import tiny_wrappers
import torch
from media_engine import MediaEngine, image_of, prompt, reference

from quire.enginecore.failed_items import TEXTS, failed_by
from quire.ipc.messages.workers import ItemFailed
from quire.ipc.sampling import SamplingParams

TEXT = [5, 81, 300, 17, 222, 4, 99, 410, 37, 51, 6, 7, 8, 144, 290, 333, 21]
BAD = image_of(3, 5)
PROMPTS = {
    "text": [TEXT],
    "bad": [TEXT, BAD, TEXT[::-1]],
    "good": [TEXT, image_of(2, 2), TEXT],
    "bad behind good": [image_of(2, 3), TEXT, BAD],
    "bad again": [TEXT, BAD, TEXT[::-1], TEXT],
    "long text": [TEXT * 5],
}


def breaks(fault):
    """What the encoder does with the bad image's tensors. fault: as in ItemFailed, or "shape"."""

    def run(rows):
        if fault == "memory":
            raise torch.OutOfMemoryError("no room for /secret")
        if fault == "error":
            raise ValueError("size mismatch")
        return rows[1:] if fault == "shape" else torch.full_like(rows, float("nan"))

    return run


class FailingEngine(MediaEngine):
    """late: calls of the scheduler between a failed run and the message about it."""

    def __init__(self, name, fault, late=0, **more):
        super().__init__(tiny_wrappers.wrapped(name), rows=64, **more)
        self.broken, self.failed, self.faults, self._told = True, {}, set(), []
        self.model.items.guarded.report = lambda number, fault: self._told.append([late, ItemFailed(0, number, fault)])
        encode, schedule = self.model.items.encode, self.scheduler.schedule

        def failing(arrived):
            rows = encode(arrived)
            if self.broken and any(item.item.num_tokens == sum(BAD.runs) for item in arrived):
                return breaks(fault)(rows)
            return rows

        def told(now=0.0):
            self.model.items.guarded.settle()  # as a worker does behind each step
            for waits in list(self._told):
                waits[0] -= 1
                if waits[0] < 0:
                    self._told.remove(waits)
                    self._fail(waits[1])
            return schedule(now)

        self.model.items.encode, self.scheduler.schedule = failing, told

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


@pytest.mark.parametrize("late", [0, 1, 3])
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
