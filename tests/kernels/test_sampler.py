"""The sampler: exact distributions, semantics written out in plain Python, kernels against the CPU path token for token.

`Harness` runs either implementation. The distributions are computed here in float64 with sorts, independently of both.
"""

import math

import numpy as np
import pytest
import torch
from sampler_harness import KINDS, QUIET, SLOTS, random_case
from sampler_harness import SamplerHarness as Harness

from quire.kernels.sampling import sampler_cpu
from quire.kernels.step.tables import HISTORY, SamplerWorkspace


@pytest.fixture(params=KINDS)
def make(request):
    """Makes a harness; .draws is how many samples a statistical test can afford on it."""

    def build(vocab, rows=64):
        kernels = request.param != "torch"
        return Harness(vocab, "cuda" if request.param == "cuda" else "cpu", kernels, rows)

    build.draws = {"torch": 3000, "interpret": 16, "cuda": 20000}[request.param]
    return build


def distribution(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Exact probabilities of the sampler, ties at a threshold kept."""
    x = np.asarray(logits, np.float64) / temperature
    p = np.exp(x - x.max())
    p[p < min_p * p.max()] = 0
    if 0 < top_k < len(p):
        p[p < np.sort(p)[-top_k]] = 0
    p /= p.sum()
    if top_p < 1:
        ordered = np.sort(p)[::-1]
        above = np.cumsum(ordered) - ordered
        p[p < ordered[above < top_p].min()] = 0
    return p / p.sum()


def check_draws(tokens, probabilities):
    """Chi-square over tokens, the rare ones pooled; within 5 sigma of its mean. Impossible tokens never occur."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * len(tokens)
    large = expected >= 5
    counts = np.append(counts[large], counts[~large].sum())
    expected = np.append(expected[large], expected[~large].sum())
    keep = expected > 1
    counts, expected = counts[keep], expected[keep]
    if len(counts) == 1:
        return
    chi = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(counts) - 1
    assert chi < freedom + 5 * math.sqrt(2 * freedom) + 3, (chi, freedom)


def draw(h, logits, draws, **flags):
    """One token for each of many positions of the same sequence."""
    rows = torch.as_tensor(logits, dtype=torch.float32).expand(draws, -1)
    return h.sample(rows, [0] * draws, range(draws), **flags).numpy()


SETTINGS = [
    {}, {"temperature": 0.5}, {"temperature": 1.7}, {"top_k": 5}, {"top_k": 1}, {"top_p": 0.8},
    {"top_p": 0.3, "temperature": 2.0}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.7, "min_p": 0.02, "temperature": 1.3},
    {"top_k": 1300}, {"top_p": 1e-6},
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_draws_follow_the_exact_distribution(make, settings):
    vocab = 1300  # three blocks of the race, the last one short
    logits = np.random.default_rng(3).normal(size=vocab).astype(np.float32)
    logits[[3, 600, 1299]] += 5
    h = make(vocab, make.draws)
    h.set(**settings)
    check_draws(draw(h, logits, make.draws), distribution(logits, **settings))


def test_ties_at_the_threshold_are_kept(make):
    h = make(8, make.draws)
    logits = [2.0, 1.0, 1.0, 1.0, 0.0, -1.0, -math.inf, 1.0]
    h.set(top_k=2)
    check_draws(draw(h, logits, make.draws), distribution(logits, top_k=2))
    h.set(top_p=0.5)
    tokens = draw(h, logits, make.draws)
    assert set(tokens) == {0, 1, 2, 3, 7}


def test_draws_with_bias_bans_and_masks(make):
    vocab = 70
    logits = np.random.default_rng(5).normal(size=vocab).astype(np.float32)
    h = make(vocab, make.draws)
    allowed = list(range(0, 60, 2))
    h.set(has_processors=True, min_len=make.draws)  # beyond the positions that are drawn: the stop id stays banned
    h.processors(bias=[(2, 3.0), (4, -3.0), (5, 100.0)], allowed=allowed, stop=[6], bad=[[8]])
    mask = torch.full((make.draws, 3), -1, dtype=torch.int32)
    mask[:, 0] &= ~(1 << 10)
    mask[:, 1] = -(2**31)  # of tokens 32 to 63 only the last
    want = logits.copy()
    want[2] += 3
    want[4] -= 3
    possible = [i for i in allowed if i not in (6, 8, 10) and not 32 <= i < 63]
    want[[i for i in range(vocab) if i not in possible]] = -np.inf
    check_draws(draw(h, logits, make.draws, bitmask=mask), distribution(want))


def penalised(logits, prompt, output, presence, frequency, repetition):
    want = np.asarray(logits, np.float64).copy()
    for token in {*prompt, *output}:
        want[token] = want[token] / repetition if want[token] > 0 else want[token] * repetition
    for token in set(output):
        want[token] -= frequency * output.count(token) + presence
    return want


def test_draws_with_penalties(make):
    logits = np.random.default_rng(6).normal(size=40).astype(np.float32) * 2
    prompt, output = [1, 2, 3, 3, 39], [3, 4, 4, 4, 5]
    h = make(40, make.draws)
    h.set(has_processors=True, presence=0.5, frequency=0.3, repetition=1.4)
    h.processors(prompt=prompt, output=output)
    check_draws(draw(h, logits, make.draws), distribution(penalised(logits, prompt, output, 0.5, 0.3, 1.4)))


def test_penalties_do_nothing_unless_the_step_and_the_slot_have_processors(make):
    h = make(4)
    h.set(temperature=0.0, presence=2.0)
    h.processors(output=[1, 1])
    logits = torch.tensor([[0.0, 1.0, 0.5, 0.2]])
    assert h.sample(logits, [0], [0]).item() == 1  # the slot has no processors
    h.set(temperature=0.0, presence=2.0, has_processors=True)
    assert h.sample(logits, [0], [0], processors=False).item() == 1
    assert h.sample(logits, [0], [0]).item() == 2


def test_bad_words_match_the_end_of_the_output(make):
    h = make(32)
    logits = torch.arange(32.0)[None]  # greedy would take 31, then 30, ...
    h.set(temperature=0.0, has_processors=True)
    words = [[31], [7, 30], [8, 7, 29], [9, 7, 28], [*range(1, HISTORY), 27]]
    h.processors(output=[5, 8, 7], bad=words)
    assert h.sample(logits, [0], [3]).item() == 28
    h.processors(output=[7, 8], bad=words)
    assert h.sample(logits, [0], [3]).item() == 30
    h.processors(output=[], bad=words)
    assert h.sample(logits, [0], [3]).item() == 30
    h.processors(output=[0, *range(1, HISTORY)], bad=[[i] for i in range(28, 32)] + words[-1:])
    assert h.sample(logits, [0], [3]).item() == 26


def test_stop_ids_wait_for_the_minimum_length(make):
    h = make(8)
    logits = torch.arange(8.0)[None]
    h.set(temperature=0.0, has_processors=True, min_len=5)
    h.processors(stop=[7, 6])
    assert [h.sample(logits, [0], [at]).item() for at in (3, 4, 5, 6)] == [5, 5, 7, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_lowest_of_equals_whatever_the_filters(make, dtype):
    h = make(2000)
    h.set(temperature=0.0, top_k=3, top_p=0.1, min_p=0.5)
    logits = torch.zeros(3, 2000, dtype=dtype)
    logits[1, [700, 701, 1999]] = 2.0
    logits[2] = -3.0
    logits[2, 1999] = -2.5
    assert h.sample(logits, [0, 0, 0], [1, 2, 3]).tolist() == [0, 700, 1999]


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}], ids=str)
def test_rows_without_sense_give_a_valid_token(make, settings):
    nan, inf = math.nan, math.inf
    h = make(600)
    h.set(**settings)
    rows = torch.zeros(6, 600)
    rows[0], rows[1], rows[2] = nan, -inf, inf
    rows[3, :300] = nan
    rows[3, 5] = inf
    rows[4] = -inf
    rows[4, 599] = -1e30
    rows[5, 0] = 3e38
    tokens = h.sample(rows, [0] * 6, range(6)).tolist()
    assert all(0 <= t < 600 for t in tokens)
    assert tokens[4] == 599
    assert tokens[5] == 0
    if settings.get("temperature") == 0.0:
        assert tokens == [0, 0, 0, 5, 599, 0]
    empty = torch.zeros(1, 19, dtype=torch.int32)
    assert 0 <= h.sample(rows[5:], [0], [0], bitmask=empty).item() < 600


def test_a_row_does_not_depend_on_its_neighbours(make):
    h = make(1300)
    for slot, settings in enumerate(SETTINGS[:SLOTS]):
        h.set(slot, **settings, seed=(slot, 0))
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(SLOTS, 1300, generator=g) * 2
    together = h.sample(logits, range(SLOTS), range(50, 50 + SLOTS)).tolist()
    alone = [h.sample(logits[i : i + 1], [i], [50 + i]).item() for i in range(SLOTS)]
    assert together == alone
    unfiltered = [i for i, s in enumerate(SETTINGS[:SLOTS]) if not {"top_k", "top_p", "min_p"} & s.keys()]
    plain = [h.sample(logits[i : i + 1], [i], [50 + i], filtered=False, processors=False).item() for i in unfiltered]
    assert plain == [alone[i] for i in unfiltered]


def test_seed_and_position_decide(make):
    h = make(5000)
    flat = torch.zeros(1, 5000)

    def token(seed, at):
        h.set(seed=seed)
        return h.sample(flat, [0], [at], processors=False, filtered=False).item()

    assert token((1, 2), 3) == token((1, 2), 3)
    others = {token(seed, at) for seed, at in (((1, 2), 4), ((2, 2), 3), ((1, 3), 3), ((-1, 2), 3), ((1, -(2**31)), 3))}
    assert len(others | {token((1, 2), 3)}) == 6


def compare_with_torch(device, vocab, rows, seed, dtype=torch.float32):
    ours, theirs = Harness(vocab, device, True, rows), Harness(vocab)
    case = random_case(ours, vocab, rows, seed, dtype)
    assert all(torch.equal(a, b) for a, b in zip(case[::3], random_case(theirs, vocab, rows, seed, dtype)[::3], strict=True))
    logits, slots, positions, mask = case
    for flags in ({"random": False, "processors": False}, {"filtered": False, "processors": False}, {"processors": False}, {}):
        for masked in ({}, {"bitmask": mask}):
            got = ours.sample(logits, slots, positions, **flags, **masked)
            assert got.tolist() == theirs.sample(logits, slots, positions, **flags, **masked).tolist(), (flags, list(masked))


@QUIET
@pytest.mark.interpret
@pytest.mark.parametrize("vocab", [513, *(pytest.param(vocab, marks=pytest.mark.slow) for vocab in (1, 2, 37, 1500))])
def test_kernels_equal_the_cpu_path_in_the_interpreter(vocab):
    compare_with_torch("cpu", vocab, 10, vocab)


@QUIET
@pytest.mark.interpret
def test_a_row_with_too_many_candidates_is_searched_in_place():
    compare_flat("cpu", 5000, 3)


def compare_flat(device, vocab, rows):
    """A nucleus wider than the list of candidates."""
    ours, theirs = Harness(vocab, device, True, rows), Harness(vocab)
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 0.3
    for settings in ({"top_p": 0.97}, {"top_k": vocab - 100}, {"top_k": vocab - 100, "top_p": 0.9, "min_p": 1e-4}):
        for h in (ours, theirs):
            h.set(**settings)
        got = ours.sample(logits, [0] * rows, range(rows), processors=False)
        assert got.tolist() == theirs.sample(logits, [0] * rows, range(rows), processors=False).tolist(), settings


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 37, 511, 512, 513, 32000, 151936, 262144])
def test_kernels_equal_the_cpu_path(vocab, dtype):
    compare_with_torch("cuda", vocab, 33, vocab, dtype)


@pytest.mark.gpu
def test_wide_nuclei_equal_the_cpu_path():
    compare_flat("cuda", 151936, 12)


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [{"random": False}, {}, {"filtered": True}, {"filtered": True, "processors": True}], ids=str)
def test_a_graph_gives_what_eager_gives(flags):
    from quire.kernels.sampling import sampler

    flags = {"random": True, **flags}
    h = Harness(32000, "cuda", True, 16)
    logits, slots, positions, mask = random_case(h, 32000, 16, 5, torch.bfloat16)
    device = [
        torch.zeros_like(logits).cuda(),
        *(torch.zeros(16, dtype=torch.int32, device="cuda") for _ in range(2)),
        mask.cuda(),
    ]

    def run():
        tokens = sampler.sample(*device[:3], h.tables, h.pool, h.workspace, bitmask=device[3], **flags)
        return tokens, sampler.sampled_logprobs(device[0], tokens, h.workspace)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, logprobs = run()
    for seed in range(4):
        logits, slots, positions, mask = random_case(h, 32000, 16, seed, torch.bfloat16)
        values = [logits, torch.tensor(slots, dtype=torch.int32), torch.tensor(positions, dtype=torch.int32), mask]
        for buffer, value in zip(device, values, strict=True):
            buffer.copy_(value)
        graph.replay()
        got, got_logprobs = tokens.clone(), [x.clone() for x in logprobs]
        want, want_logprobs = run()
        assert torch.equal(got, want)
        assert all(torch.equal(a, b) for a, b in zip(got_logprobs, want_logprobs, strict=True))


# log-probabilities


@pytest.mark.parametrize("vocab", [1, 7, 1300])
def test_prompt_logprobs_are_those_of_log_softmax(vocab):
    logits = torch.randn(70, vocab, generator=torch.Generator().manual_seed(vocab)).bfloat16()
    targets = torch.randint(0, vocab, (70,), dtype=torch.int32)
    targets[0] = -1
    logprob, rank, ids, top = sampler_cpu.prompt_logprobs(logits, targets, 5)
    want = logits.float().log_softmax(-1)
    targets[0] = 0
    torch.testing.assert_close(logprob, want.gather(1, targets.long()[:, None])[:, 0])
    assert rank.tolist() == [1 + int((want[i] > want[i, t]).sum()) for i, t in enumerate(targets.tolist())]
    n = min(5, vocab)
    torch.testing.assert_close(top[:, :n], want.topk(n).values)
    torch.testing.assert_close(want.gather(1, ids.long())[:, :n], top[:, :n])
    assert ids.shape == top.shape == (70, 5)
    assert (top[:, n:] == -torch.inf).all()
    assert [x.shape[0] for x in sampler_cpu.prompt_logprobs(logits[:0], targets[:0], 3)] == [0] * 4


def compare_logprobs(device, vocab, dtype, num_top=20):
    from quire.kernels.sampling import sampler

    logits = (torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab)) * 3).to(device, dtype)
    if vocab > 1:
        logits[1, 0] = -torch.inf
    sampled = torch.randint(0, vocab, (5,), dtype=torch.int32, generator=torch.Generator().manual_seed(1)).to(device)
    workspace = SamplerWorkspace.allocate(5, vocab, device)
    ours = sampler.sampled_logprobs(logits, sampled, workspace, num_top)
    theirs = sampler_cpu.sampled_logprobs(logits, sampled, num_top=num_top)
    assert ours[2].shape == ours[3].shape == (5, num_top)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=2e-5)
    assert torch.equal(ours[1], theirs[1])
    torch.testing.assert_close(ours[3], theirs[3], rtol=1e-5, atol=2e-5)
    if dtype == torch.float32:
        assert torch.equal(ours[2], theirs[2])
    assert [x.dtype for x in ours] == [x.dtype for x in theirs] == [torch.float32, torch.int32, torch.int32, torch.float32]


@QUIET
@pytest.mark.interpret
@pytest.mark.parametrize(("vocab", "num_top"), [(1, 20), (7, 20), (9000, 20), (9000, 128)])
def test_logprobs_in_the_interpreter(vocab, num_top):
    compare_logprobs("cpu", vocab, torch.float32, num_top)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 7, 9000, 151936])
def test_logprobs(vocab, dtype):
    compare_logprobs("cuda", vocab, dtype)
