"""A worker answers the core's requests about adapters: in their order, from a thread, with an error or none."""

import queue

from inline_engine import InlineEngine
from peft_folders import write_adapter
from tiny_models import tiny_model

from quire.ipc.adapters import HOST_ONLY, AdapterLimits
from quire.ipc.messages.workers import ForgetAdapter, LoadAdapter
from quire.ipc.sampling import SamplingParams
from quire.ipc.step.control import decode_control, encode_control
from quire.workers.adapters.loads import AdapterLoads
from quire.workers.adapters.peft import read_adapter

LIMITS = AdapterLimits(max_loras=2)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def test_requests_are_answered_late_and_in_order(tmp_path):
    model = tiny_model("llama")
    engine = InlineEngine(model, adapters=LIMITS, enable_prefix_caching=False)
    answers: queue.Queue = queue.Queue()
    loads = AdapterLoads(engine.adapters, lambda number, error: answers.put((number, error)))
    good, changed = (read_adapter(write_adapter(tmp_path / name, model, seed=1), LIMITS) for name in ("good", "changed"))
    write_adapter(tmp_path / "changed", model, seed=2)
    requests = [
        LoadAdapter(1, 11, HOST_ONLY, good),
        LoadAdapter(2, 11, 1, good),
        LoadAdapter(3, 12, 0, changed),
        ForgetAdapter(4, 11),
        ForgetAdapter(5, 99),
        LoadAdapter(6, 11, 7, good),
    ]
    for request in requests:
        loads.take(decode_control(encode_control(request)))
    got = [answers.get(timeout=30) for _ in requests]
    assert [number for number, _ in got] == [1, 2, 3, 4, 5, 6]
    errors = [error for _, error in got]
    assert errors[2] == "the adapter's file has changed" and errors[5].startswith("IndexError")
    assert [errors[i] for i in (0, 1, 3, 4)] == [""] * 4
    prompt = [list(range(20, 40))]
    assert engine.generate(prompt, GREEDY, [1]) != engine.generate(prompt, GREEDY) == engine.generate(prompt, GREEDY, [0])
