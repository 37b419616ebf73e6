"""`quire serve --pipeline-parallel-size`: stages as processes on CPUs, killed and stopped in mid-stream; what cannot be cut."""

from collections.abc import Iterator

import pytest
from inline_engine import InlineEngine
from served_ranks import PROMPT, WORKER, assert_lost_and_replaced, assert_replaced, killed, restarts_of, stopped, worker
from serving import SMALL, Served
from tiny_models import tiny_model

from quire.enginecore.loading.model_files import BUNDLED
from quire.ipc.sampling import SamplingParams

TIMEOUT_S = 2
IDS = [5, 600, 7, 1900, 2000, 40]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bob"]}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def two() -> Iterator[Served]:
    with Served(*SMALL, "-pp", "2", "--collective-timeout-s", str(TIMEOUT_S)) as served:
        served.ready()
        yield served
        assert served.end() == 0


def tokens_of(served: Served, **params: object) -> list[int]:
    answer = served.complete(IDS, max_tokens=24, ignore_eos=True, return_token_ids=True, **params)
    return list(answer["choices"][0]["token_ids"])


def alone(**params: object) -> list[int]:
    return InlineEngine(BUNDLED).generate([IDS], SamplingParams(max_tokens=24, ignore_eos=True, **params))[0]  # type: ignore[arg-type]


@pytest.mark.slow
def test_two_stages_give_the_tokens_of_one_and_a_killed_one_is_named_and_both_are_replaced(two: Served) -> None:
    assert len(two.pids(WORKER)) == 2
    for params in ({"temperature": 0.0}, {"temperature": 0.9, "seed": 3, "top_p": 0.9, "presence_penalty": 0.4}):
        assert tokens_of(two, **params) == alone(**params)
    assert_lost_and_replaced(two, 1, "kill", killed(1))


def test_a_grammar_binds_and_prompts_tell_their_logprobs(two: Served) -> None:
    answer = two.complete(PROMPT, max_tokens=40, temperature=0.0, structured_outputs={"json": SCHEMA})
    assert '"name"' in answer["choices"][0]["text"]
    answer = two.complete(IDS, max_tokens=2, temperature=0.0, prompt_logprobs=2, logprobs=2)
    assert len(answer["choices"][0]["prompt_logprobs"]) == len(IDS)


@pytest.mark.slow
def test_the_first_stage_killed(two: Served) -> None:
    assert_lost_and_replaced(two, 0, "kill", killed(0))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_stage_is_named_after_the_timeout_and_all_are_replaced(two: Served, rank: int) -> None:
    assert_lost_and_replaced(two, rank, "suspend", stopped(rank))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_that_is_stopped_before_a_prompt_comes_is_named(two: Served, rank: int) -> None:
    """Nobody waits for the last stage's tokens but the first one, while it has nothing else to do."""
    text, restarts, before = two.text(PROMPT, max_tokens=10), restarts_of(two), two.pids(WORKER)
    worker(two, rank).suspend()
    assert two.ask("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 1}).error["code"] == "engine_error"
    two.line(stopped(rank))
    assert_replaced(two, before, text, restarts)


@pytest.mark.slow
def test_three_stages_and_two_of_two_ranks_and_each_of_these_killed() -> None:
    for arguments, size in ((("-pp", "3"), 3), (("-pp", "2", "-tp", "2"), 4)):
        with Served(*SMALL, *arguments, "--collective-timeout-s", str(TIMEOUT_S)) as served:
            served.ready()
            assert len(served.pids(WORKER)) == size
            assert tokens_of(served, temperature=0.9, seed=3) == alone(temperature=0.9, seed=3)
            for rank in range(size):
                assert_lost_and_replaced(served, rank, "kill", killed(rank), size)
            assert served.end() == 0


@pytest.mark.slow
def test_nothing_is_left_of_more_stages_than_layers() -> None:
    with Served(str(tiny_model("llama")), *SMALL, "--pipeline-parallel-size", "4") as served:
        assert served.wait() == 1
        assert served.lines[-1] == (
            "quire serve: --pipeline-parallel-size 4: the model has 3 layers, and each stage needs one at least"
        )
    with Served(str(tiny_model("llama")), *SMALL, "-pp", "2", "--model-impl", "transformers") as served:
        assert served.wait() == 1
        assert served.lines[-1].endswith("--model-impl transformers runs a model in one piece: --pipeline-parallel-size 1")
