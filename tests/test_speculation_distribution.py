"""In 16 bits, and with weights and caches of fewer, drafts leave the distribution of answers as it is: G-tests at T = 1.

Tokens may differ there, since a step of several tokens rounds otherwise. Draws with and without drafts have other seeds.
"""

import pytest
import torch
from inline_engine import InlineEngine
from test_speculation import config
from tiny_models import tiny_model

from quire.ipc.sampling import SamplingParams

DRAWS, TOKENS, IDS = 6400, 3, 64
PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
LEAST_P = 1e-4


def draws(speculation, first_seed, how):
    """int [DRAWS, TOKENS], and how many drafts were verified and accepted."""
    engine = InlineEngine(
        tiny_model("64-ids"),
        dtype=torch.bfloat16,
        max_num_seqs=64,
        max_model_len=32,
        speculation=speculation,
        model_options=how,
    )
    params = [
        SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=first_seed + i, ignore_eos=True, bad_words_token_ids=[])
        for i in range(DRAWS)
    ]
    found = torch.tensor(engine.generate([PROMPT] * DRAWS, params))
    stats = engine.scheduler.counters.windows.so_far()
    return found, (0, 0) if stats is None else (stats.draft_tokens, sum(stats.accepted_by_place))


def p_value(a, b, cells):
    """The p-value of the G-test that two samples of cells have one distribution (a log-likelihood ratio; Wilks, 1938)."""
    counts = torch.stack([torch.bincount(x, minlength=cells) for x in (a, b)]).double()
    rare = counts.sum(0) < 20
    counts = torch.cat([counts[:, ~rare], counts[:, rare].sum(1, keepdim=True)], 1)  # chi-squared holds for common cells
    counts = counts[:, counts.sum(0) > 0]
    expected = counts.sum(1, keepdim=True) * counts.sum(0) / counts.sum()
    g = 2 * torch.where(counts > 0, counts * (counts / expected).log(), 0.0).sum()
    return torch.special.gammaincc(torch.tensor((counts.shape[1] - 1) / 2).double(), g / 2).item()


def cells_of(tokens):
    """Name -> (cell of each draw, how many there are): each token by itself, and pairs."""
    yield from ((tokens[:, i], IDS) for i in range(TOKENS))
    yield from ((tokens[:, i] * IDS + tokens[:, i + 1], IDS * IDS) for i in range(TOKENS - 1))


@pytest.mark.parametrize(
    ("how", "drafter"),
    [
        pytest.param({}, "itself", marks=pytest.mark.slow),
        pytest.param({}, "ngram", marks=pytest.mark.slow),
        pytest.param({"quantization": "fp8"}, "itself", marks=pytest.mark.slow),
        pytest.param({"quantization": "int4"}, "itself", marks=pytest.mark.slow),
        pytest.param({"kv_cache_dtype": "fp8"}, "itself", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_distribution_is_that_without_drafts(how, drafter):
    itself = {"method": "draft_model", "model": str(tiny_model("64-ids"))}
    plain, _ = draws(None, 0, how)
    drafted, (drafts, accepted) = draws(config(3, **(itself if drafter == "itself" else {})), DRAWS, how)
    assert drafts > 100 and accepted > (0.5 * drafts if drafter == "itself" else 0)  # the draft model is not quantized
    values = [p_value(a, b, cells) for (a, cells), (b, _) in zip(cells_of(plain), cells_of(drafted), strict=True)]
    assert min(values) > LEAST_P


def test_another_distribution_is_seen():
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(IDS, generator=generator)
    a = torch.multinomial(weights, DRAWS, True, generator=generator)
    b = torch.multinomial(weights, DRAWS, True, generator=generator)
    worse = torch.where(torch.rand(DRAWS, generator=generator) < 0.1, b[torch.randperm(DRAWS, generator=generator)] // 2, b)
    assert p_value(a, b, IDS) > 0.01 and p_value(a, worse, IDS) < LEAST_P
