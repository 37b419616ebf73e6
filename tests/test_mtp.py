"""MTP layers in fp32 on the CPU: their logits are those of a plain reference, and tokens are those without drafts.

Random layers are hardly ever right, so what is right here is drawn from the reference's logits, not from acceptance.
"""

import json
import shutil

import pytest
from eagle3_heads import note_drafts
from inline_engine import InlineEngine
from mtp_heads import MODELS, assert_mtp_right, mtp_model, mtp_of
from test_speculation import EOS, MAX_LEN, SCHEDULING, assert_equal, config, outputs_of
from thread_ranks import engine_of_ranks
from tiny_models import tiny_model

from quire.ipc.sampling import SamplingParams
from quire.workers.loading.weight_loader import WeightsError
from quire.workers.models.config import ModelConfigError

PROMPT = [(5 * k * k) % 400 + 4 for k in range(70)]


def engine_of(name, window=4, **how):
    folder = mtp_model(name)
    speculation = config(window, method="mtp", model=str(folder)) if window else None
    return InlineEngine(folder, **{"max_model_len": MAX_LEN, "eos": (EOS,), "speculation": speculation, **how})


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_reference(name):
    """Behind prompts in chunks, accepted and rejected drafts, steps without drafts and the ends of blocks."""
    engine = engine_of(name, 5, budget=24, max_num_seqs=5, max_model_len=200)
    found = note_drafts(engine)
    prompts = [[7], *(PROMPT[: 12 + 10 * i] for i in range(6))]
    engine.generate(prompts, [SamplingParams(max_tokens=20, temperature=0.7, seed=i, ignore_eos=True) for i in range(7)])
    assert_mtp_right(found, mtp_of(name))


@pytest.mark.parametrize(("name", "scheduling"), list(zip(MODELS, SCHEDULING, strict=False)))
def test_tokens_are_those_without_drafts(name, scheduling):
    engine = engine_of(name, **SCHEDULING[scheduling])
    assert_equal(outputs_of(engine), outputs_of(engine_of(name, 0)))
    assert engine.scheduler.counters.windows.so_far().draft_tokens > 0


@pytest.mark.parametrize("name", ["mimo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek-v3", "qwen3.5"))])
def test_a_prefix_that_is_hit_is_whole_and_right(name):
    """No token is computed twice for its hidden state: the one before a hit's end is kept with its block."""
    plain, engine = (engine_of(name, window, max_model_len=400) for window in (0, 5))
    found, params = note_drafts(engine), SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    outputs, cached = [], []
    for each in (plain, engine):
        (first,) = each.generate([PROMPT], params)
        before = len(found)
        others = [PROMPT[:64] + [9, 8, 7], PROMPT + first, PROMPT + first[:26] + [11]]
        outputs.append([first, *each.generate([PROMPT, *others], params)])
        cached.append(each.scheduler.counters.cached_tokens)
    assert outputs[0] == outputs[1] and cached[0] == cached[1] >= 64 * 4
    assert_mtp_right(found[before:], mtp_of(name))


@pytest.mark.parametrize("name", ["glm4-moe", "qwen3.5"])
def test_ranks_draft_alike(name):
    """Also where sums over the ranks are formed with the norms behind them, which the last one is."""
    speculation = config(4, method="mtp", model=str(mtp_model(name)))
    engine = engine_of_ranks(mtp_model(name), 2, max_model_len=MAX_LEN, speculation=speculation, for_norms=name == "glm4-moe")
    alone = engine_of(name)
    prompts, params = [PROMPT[:20], PROMPT[:33]], SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    assert engine.generate(prompts, params) == alone.generate(prompts, params)
    ranks, one = (e.scheduler.counters.windows.so_far() for e in (engine, alone))
    assert ranks == one and one.draft_tokens > 0


@pytest.mark.parametrize("name", ["glm4-moe", "nemotron-h"])
def test_a_flag_quantizes_these_layers_too(name):
    """And they draft, with keys and values of 32 bits, for a model that has 8."""
    options = {"quantization": "fp8", **({} if name == "nemotron-h" else {"kv_cache_dtype": "fp8"})}
    engine = engine_of(name, model_options=options)
    assert engine.draft.config.quantization is engine.model.config.quantization
    want = engine_of(name, 0, model_options=options)
    prompts, params = [PROMPT[:20], PROMPT[:33]], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    assert engine.generate(prompts, params) == want.generate(prompts, params)


@pytest.mark.parametrize(
    ("model", "changes", "said"),
    [
        ("llama", {}, "mtp needs a model with layers that predict further tokens, and none are known of this one"),
        ("deepseek-v3", {}, "mtp: the checkpoint has no tensors of layers that predict further tokens"),
        ("qwen3.5", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings): not supported"),
        ("qwen3.5", {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers): not supported"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(model, changes, said, tmp_path):
    folder = shutil.copytree(tiny_model(model), tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ModelConfigError, match=r"^--speculative-config: model ") as refused:
        InlineEngine(folder, speculation=config(4, method="mtp", model=str(folder)))
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_missing_tensor_is_named(tmp_path):
    folder = mtp_of("glm4-moe").save(tmp_path, without=["eh_proj.weight"])
    with pytest.raises(WeightsError, match=r"mtp\.fc\.weight"):
        InlineEngine(folder, speculation=config(4, method="mtp", model=str(folder)))
