"""`quire serve --enable-expert-parallel`: ranks as processes on CPUs, the tokens of one, and the load of each in /metrics,
of all layers, in one stage or two."""

import re
from collections.abc import Iterator

import pytest
from inline_engine import InlineEngine
from serving import SMALL, Served, until
from tiny_models import tiny_model

from quire.ipc.sampling import SamplingParams

TOKENS = "quire:expert_parallel_tokens_total"
LAYERS, TOP_K = 3, 2


@pytest.fixture(scope="module", params=["1", pytest.param("2", marks=pytest.mark.slow)], ids=["one stage", "two stages"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    layout = "-tp", "2", "-pp", request.param, "--enable-expert-parallel"
    with Served(str(tiny_model("qwen3-moe")), *SMALL, *layout) as server:
        yield server.ready()
        assert server.end() == 0


def by_rank(served: Served) -> list[float]:
    text = served.ask("GET", "/metrics").body.decode()
    return [float(n) for n in re.findall(rf'^{TOKENS}{{model_name="[^"]*",engine="0",rank="[01]"}} (\S+)$', text, re.M)]


def test_the_tokens_of_one_process_and_how_evenly_experts_were_asked(served: Served) -> None:
    until(lambda: by_rank(served) == [0, 0])  # there is a first Heartbeat
    assert served.metric("expert_parallel_imbalance") == 1.0
    ids, asked = [5, 60, 7, 190, 200, 40], ({"temperature": 0.0}, {"temperature": 0.9, "seed": 3})
    engine = InlineEngine(tiny_model("qwen3-moe"))
    alone = engine.generate([ids] * 2, [SamplingParams(max_tokens=24, ignore_eos=True, **p) for p in asked])
    for params, tokens in zip(asked, alone, strict=True):
        answer = served.complete(ids, max_tokens=24, ignore_eos=True, return_token_ids=True, **params)
        assert answer["choices"][0]["token_ids"] == tokens
    # the second prompt's first tokens are cached in no block of 16; each request computes its prompt and all tokens but the
    # last, and maybe one beyond; the last layer computes last tokens alone
    least = 2 * ((LAYERS - 1) * (6 + 23) + 24) * TOP_K
    until(lambda: sum(by_rank(served)) >= least)
    assert sum(by_rank(served)) <= least + 2 * LAYERS * TOP_K
    assert 1.0 <= served.metric("expert_parallel_imbalance") <= 2.0
    assert min(by_rank(served)) > 0


def test_a_dense_model_is_refused() -> None:
    with Served(str(tiny_model("llama")), *SMALL, "-ep") as served:
        assert served.wait() == 1
        assert served.lines[-1] == "quire serve: --enable-expert-parallel: the model has no experts; leave the flag out"
