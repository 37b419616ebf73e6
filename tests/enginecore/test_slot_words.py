"""A slot update: every declared value, read from its sequence, within what its type can hold."""

import math
import types
from typing import Any

import numpy as np
import pytest

from quire.enginecore.kv.sequence_blocks import SequenceBlocks
from quire.enginecore.scheduling.plan_builder import slot_words
from quire.enginecore.tasks.generate import GenerateTask
from quire.ipc.sampling import BOUNDS, SamplingParams
from quire.ipc.step.plan import DTYPES
from quire.ipc.step.sections import SLOT_VALUES

OF_PARAMS = "task.sampling."
PARAMS = {v.source.removeprefix(OF_PARAMS): v for v in SLOT_VALUES if v.source.startswith(OF_PARAMS)}


def written(seed: int = 1, **params: Any) -> np.ndarray:
    blocks = SequenceBlocks(b"", use_cache=True, may_hit=True)
    own = {"slot": 3, "seed": seed, "has_processors": True, "min_len": 17, "final_len": 90, "max_window": 16}
    own |= {"adapter_slot": 2, "adapter_from": 5, "rotary_delta": -5}
    sequence = types.SimpleNamespace(task=GenerateTask(SamplingParams(**params)), blocks=blocks, **own)
    (row,) = np.frombuffer(slot_words(sequence), DTYPES["slot_updates"])
    return row


def test_the_state_of_a_sequence_is_written_by_name():
    row = written(temperature=0.75, top_k=40, repetition_penalty=1.25, logprobs=3)
    assert (row["slot"], row["seed"], row["has_processors"], row["min_len"]) == (3, 1, 1, 17)
    assert (row["final_len"], row["max_window"], row["rotary_delta"]) == (90, 16, -5)
    assert (row["adapter"], row["adapter_from"]) == (2, 5)
    assert (row["temperature"], row["top_k"], row["repetition"], row["num_logprobs"]) == (0.75, 40, 1.25, 3)
    assert written()["num_logprobs"] == -1 and written(top_k=-1)["top_k"] == 0


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1, -1, -(2**63)])
def test_a_seed_keeps_its_64_bits(seed):
    assert written(seed)["seed"] == seed % 2**64


@pytest.mark.parametrize("name", PARAMS)
def test_every_parameter_is_written_at_its_bounds_and_beyond_what_a_word_holds(name):
    """A value that is within its bounds can be sent, and is a finite number of the same sign."""
    low, high, closed = BOUNDS[name]
    whole = PARAMS[name].dtype == "int32"
    least = 1e-300 if low == 0 and not closed else low
    largest = high if high is not None else (2**63 - 1 if whole else 1e300)
    for value in (least, largest):
        got = float(written(**{name: value})[PARAMS[name].name])
        assert math.isfinite(got) and (got > 0 if value > 0 and (closed is False or value == largest) else got >= min(value, 0))


@pytest.mark.parametrize("name", [name for name, v in PARAMS.items() if v.dtype == "float32"])
def test_a_value_that_fits_is_written_as_it_is(name):
    assert written(**{name: 0.625})[PARAMS[name].name] == 0.625
