"""`quire serve --tensor-parallel-size`: ranks as processes on CPUs, killed and stopped in mid-stream; sizes that cannot be."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from inline_engine import InlineEngine
from served_ranks import (
    LONG,
    PROMPT,
    WORKER,
    assert_lost_and_replaced,
    assert_replaced,
    killed,
    restarts_of,
    running,
    stopped,
    worker,
)
from serving import SMALL, Served, ends_well, error_of
from tiny_models import tiny_model

from quire.enginecore.loading.model_files import BUNDLED
from quire.ipc.sampling import SamplingParams

TIMEOUT_S = 2


@pytest.fixture(scope="module")
def two() -> Iterator[Served]:
    with Served(*SMALL, "-tp", "2", "--collective-timeout-s", str(TIMEOUT_S)) as served:
        yield served.ready()
        assert served.end() == 0


def test_two_processes_give_the_tokens_of_one_and_a_killed_one_is_named_and_both_are_replaced(two: Served) -> None:
    assert len(two.pids(WORKER)) == 2
    ids, asked = [5, 600, 7, 1900, 2000, 40], ({"temperature": 0.0}, {"temperature": 0.9, "seed": 3})
    alone = InlineEngine(BUNDLED).generate([ids] * 2, [SamplingParams(max_tokens=24, ignore_eos=True, **p) for p in asked])
    for params, tokens in zip(asked, alone, strict=True):
        answer = two.complete(ids, max_tokens=24, ignore_eos=True, return_token_ids=True, **params)
        assert answer["choices"][0]["token_ids"] == tokens
    assert_lost_and_replaced(two, 1, "kill", killed(1))


@pytest.mark.slow
def test_the_first_rank_killed(two: Served) -> None:
    assert_lost_and_replaced(two, 0, "kill", killed(0))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named_after_the_timeout_and_all_are_replaced(two: Served, rank: int) -> None:
    assert_lost_and_replaced(two, rank, "suspend", stopped(rank))


@pytest.mark.slow
def test_a_rank_stopped_while_it_starts_is_named_and_nothing_is_left() -> None:
    with Served(*SMALL, "-tp", "2", "--collective-timeout-s", str(TIMEOUT_S)) as served:
        worker(served, 1).suspend()
        assert served.wait() == 1
        assert "worker 1 was stopped by a signal" in served.lines[-1] and "still start" in served.lines[-1]


@pytest.mark.slow
def test_ranks_that_are_all_stopped_wait_for_nobody_and_are_found_all_the_same(two: Served) -> None:
    text, restarts, before = two.text(PROMPT, max_tokens=10), restarts_of(two), two.pids(WORKER)
    stream = running(two)
    for rank in (0, 1):
        worker(two, rank).suspend()
    assert ends_well(stream)
    two.line("workers 0 and 1 were stopped by a signal, and a step has taken 2.* s; 1 sequences in flight run again")
    assert_replaced(two, before, text, restarts)


PROCESSOR = """
import os, threading
from quire.workers.logits_processors.interface import LogitsProcessor

class Odd(LogitsProcessor):
    \"\"\"Keeps one rank from its step: by a request's `do`, for good.\"\"\"

    def __init__(self, vllm_config, device, is_pin_memory):
        self.rank, self.rows = vllm_config.parallel_config.rank, {}

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        for index, params, prompt, output in (batch_update.added if batch_update else ()):
            self.rows[index] = (params.extra_args or {}).get("do"), output

    def apply(self, logits):
        for do, output in self.rows.values():
            if self.rank == 1 and do == "hang" and len(output) > 5:
                threading.Event().wait()
            if do == "differ":  # user code may be random: all ranks take the first one's token
                logits[:, 100 + self.rank] = 1e9
        return logits
"""


@pytest.mark.slow
def test_a_rank_that_hangs_in_a_step_is_named_and_one_whose_own_code_differs_goes_along(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(PROCESSOR)
    arguments = ("-tp", "2", "--collective-timeout-s", str(TIMEOUT_S), "--logits-processors", f"{tmp_path / 'odd.py'}:Odd")
    with Served(*SMALL, *arguments) as served:
        served.ready()
        text, before = served.text(PROMPT, max_tokens=10), served.pids(WORKER)
        differ = {"max_tokens": 6, "ignore_eos": True, "return_token_ids": True, "vllm_xargs": {"do": "differ"}}
        assert served.complete(PROMPT, **differ)["choices"][0]["token_ids"] == [100] * 6
        stream = served.stream(PROMPT, **LONG, vllm_xargs={"do": "hang"})
        assert error_of(stream)["code"] == "engine_error"
        served.line(r"worker 1 was silent in an exchange for --collective-timeout-s \(2 s\); worker 0 says: .*; 1 sequences in")
        assert_replaced(served, before, text, 1)  # it was the cause of two deaths
        assert served.end() == 0


@pytest.mark.slow
def test_nothing_is_left_of_a_size_that_does_not_fit() -> None:
    with Served(*SMALL, "--tensor-parallel-size", "3") as served:
        assert served.wait() == 1
        assert served.lines[-1] == (
            "quire serve: --tensor-parallel-size 3 does not fit the model: its 4 attention heads cannot be split over 3 ranks; "
            "1, 2, 4 would do"
        )


@pytest.mark.slow
@pytest.mark.parametrize("size", ["2", "4"])
def test_a_model_with_a_head_in_parts_and_one_with_few_kv_heads(size: str) -> None:
    folder = tiny_model("split-llama")
    arguments = (str(folder), *SMALL, "--enforce-eager")
    body = {"max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
    texts = []
    for more in ((), ("-tp", size)):
        with Served(*arguments, *more) as served:
            served.ready()
            texts.append([c["token_ids"] for c in served.complete([[5, 6, 7], list(range(9, 60))], **body)["choices"]])
            assert served.end() == 0
    assert texts[0] == texts[1]
