"""--speculative-config: what vLLM's keys become, and one clear line for each that cannot work or is not served."""

import json

import msgspec
import pytest

from quire.enginecore.cli import command_parser
from quire.ipc.config import EngineConfig, engine_config_from
from quire.ipc.process.flags import json_flags, normal_words
from quire.ipc.speculative_config import SpeculativeConfig
from quire.ipc.speculative_options import method_of, speculation_of

NGRAM = {"method": "ngram"}
PER_SIZE = "num_speculative_tokens_per_batch_size"
DRAFT = {"method": "draft_model", "model": "a/b"}
SYNTHETIC = {"rejection_sample_method": "synthetic", "num_speculative_tokens": 2}


def config_of(*words: str) -> EngineConfig:
    parser = command_parser()
    args = parser.parse_args(normal_words(["--listen", "ipc://x", *words], json_flags(parser)))
    return engine_config_from(args)


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ({}, {}),
        ({"num_speculative_tokens": 3}, {"num_speculative_tokens": 3}),
        ({"num_speculative_tokens": 99}, {"asked_tokens": 99}),
        ({"prompt_lookup_max": 3}, {"prompt_lookup_min": 3, "prompt_lookup_max": 3}),
        ({"prompt_lookup_min": 2}, {"prompt_lookup_min": 2, "prompt_lookup_max": 2}),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, {"prompt_lookup_min": 2, "prompt_lookup_max": 4}),
        ({"method": "ngram_gpu", "model": "[ngram]"}, {}),
        ({"method": None, "model": "ngram"}, {}),
        ({"method": None, "prompt_lookup_max": 5}, {}),
        ({"enable_adaptive_verification": False}, {"enable_adaptive_verification": False}),
        ({"quantization": None, "parallel_drafting": False, "disable_logprobs": True}, {}),
        ({PER_SIZE: [[1, 4, 5], [9, 16, 0]]}, {PER_SIZE: [(1, 4, 5), (9, 16, 0)]}),
        ({"rejection_sample_method": "strict"}, {}),
        (
            {**SYNTHETIC, "synthetic_acceptance_rates": [0.75, 0.5]},
            {"num_speculative_tokens": 2, "synthetic_acceptance_rates": [0.75, 0.5]},
        ),
        (
            {**SYNTHETIC, "synthetic_acceptance_length": 2.5},
            {"num_speculative_tokens": 2, "synthetic_acceptance_rates": [1.0, 0.5]},
        ),
    ],
    ids=str,
)
def test_what_keys_become(given: dict[str, object], changes: dict[str, object]) -> None:
    expected = msgspec.structs.replace(SpeculativeConfig(method="ngram"), **changes)
    assert speculation_of({**NGRAM, **given}) == expected == speculation_of(expected)


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        (DRAFT, {}),
        ({"model": "a/b", "num_speculative_tokens": 2}, {"num_speculative_tokens": 2}),
        ({**DRAFT, "num_speculative_tokens": 16}, {"num_speculative_tokens": 15, "asked_tokens": 16}),
        (
            {**DRAFT, "quantization": "fp8", "revision": "main", "max_model_len": 200},
            {"quantization": "fp8", "revision": "main", "max_model_len": 200},
        ),
        ({**DRAFT, "prompt_lookup_max": None, "draft_tensor_parallel_size": None, "use_heterogeneous_vocab": False}, {}),
        ({**DRAFT, **SYNTHETIC, "synthetic_acceptance_length": 2.5}, {**SYNTHETIC, "synthetic_acceptance_rates": [1.0, 0.5]}),
    ],
    ids=str,
)
def test_what_keys_of_a_draft_model_become(given: dict[str, object], changes: dict[str, object]) -> None:
    changes = {name: value for name, value in changes.items() if name != "rejection_sample_method"}
    expected = SpeculativeConfig(method="draft_model", model="a/b", **{"num_speculative_tokens": 7, **changes})
    assert speculation_of(given) == expected == speculation_of(expected)


def test_a_head_is_told_by_its_config_with_its_own_number_of_drafts(tmp_path) -> None:
    ways = [{"proposal_type": "greedy", "speculative_tokens": 3}]
    fields = {"speculators_model_type": "eagle3", "speculators_config": {"proposal_methods": ways}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    expected = SpeculativeConfig(method="eagle3", model=str(tmp_path), num_speculative_tokens=3)
    assert speculation_of({"model": str(tmp_path)}) == expected
    assert speculation_of({"method": "eagle3", "model": "a/b"}) == SpeculativeConfig(
        method="eagle3", model="a/b", num_speculative_tokens=7
    )


@pytest.mark.parametrize(
    ("given", "drafts"),
    [
        ({"method": "mtp"}, 1),
        ({"num_speculative_tokens": 3}, 3),
        ({"method": "qwen3_next_mtp", "num_speculative_tokens": 2}, 2),
    ],
    ids=str,
)
def test_a_models_own_layers_draft(given: dict[str, object], drafts: int) -> None:
    assert speculation_of(given) == SpeculativeConfig(method="mtp", num_speculative_tokens=drafts)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "name a method"),
        ({"method": "ngramm"}, "there is no method 'ngramm'; did you mean ngram?"),
        ({**NGRAM, "num_spec_tokens": 3}, "no key 'num_spec_tokens'; did you mean num_speculative_tokens?"),
        ({**NGRAM, "model": "a/b"}, "model 'a/b' contradicts method ngram"),
        ({"method": "draft_modle", "model": "a/b"}, "there is no method 'draft_modle'; did you mean draft_model?"),
        ({**DRAFT, "prompt_lookup_max": 3}, "prompt_lookup_max=3 is a key of n-grams, and the method is another"),
        ({**DRAFT, "draft_tensor_parallel_size": 2}, "a draft model is run like the model, with its type, kernels and GPUs"),
        (
            {**DRAFT, "use_heterogeneous_vocab": True},
            "use_heterogeneous_vocab=True is not served: a draft model has the model's",
        ),
        ({**DRAFT, "draft_sample_method": "greedy"}, "drafts are drawn with a request's own parameters"),
        ({**DRAFT, "quantization": "fp9"}, "quantization must be one of fp8,"),
        ({**DRAFT, "max_model_len": 0}, "max_model_len must be at least 1"),
        ({"model": "org/EAGLE-Llama"}, "method 'eagle', which model 'org/EAGLE-Llama' is for, is not served yet"),
        ({"method": "mtp", "quantization": "fp8"}, "quantization='fp8' is a key of models with a folder of their own, and mtp"),
        ({"method": "dflash", "model": "a"}, "method 'dflash' is not served;"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 3}, "method 'suffix' is not served;"),
        ({"method": "medusa", "model": "a"}, "method 'medusa' is not served;"),
        ({"method": "mlp_speculator", "model": "a"}, "method 'mlp_speculator' is not served;"),
        ({**NGRAM, "suffix_decoding_min_token_prob": 0.2}, "suffix_decoding_min_token_prob=0.2 is a key of suffix decoding"),
        ({**NGRAM, "parallel_drafting": True}, "parallel_drafting=True (PARD, P-EAGLE) is not served"),
        ({**NGRAM, "speculative_token_tree": "[(0,)]"}, "drafts are chains and no trees"),
        ({**NGRAM, "draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size=2 is no key of it: a draft model is run like"),
        ({**NGRAM, "max_model_len": 200}, "max_model_len=200 is a key of draft models"),
        ({**NGRAM, "num_speculative_tokens": "3"}, "num_speculative_tokens: expected int | null, got str"),
        ({**NGRAM, "num_speculative_tokens": 0}, "num_speculative_tokens must be at least 1"),
        ({**NGRAM, "num_speculative_tokens": -2}, "num_speculative_tokens must be at least 1"),
        ({**NGRAM, "prompt_lookup_min": 0}, "prompt_lookup_min must be at least 1"),
        ({**NGRAM, "prompt_lookup_max": 33}, "prompt_lookup_max must be at most 32"),
        ({**NGRAM, "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min (4) must not be above"),
        ({**NGRAM, "disable_by_batch_size": 0}, "disable_by_batch_size must be at least 1"),
        ({**NGRAM, PER_SIZE: [[2, 4, 1]]}, "the first range begins at 1"),
        ({**NGRAM, PER_SIZE: [[1, 4, -1]]}, "[[first, last, most drafts], ...]"),
        ({**NGRAM, PER_SIZE: [[1, 4, 3], [4, 8, 1]]}, "ranges rise and do not overlap"),
        ({**NGRAM, "rejection_sample_method": "block"}, "there are standard and synthetic"),
        ({**NGRAM, "synthetic_acceptance_rates": [0.5]}, 'needs {"rejection_sample_method": "synthetic"}'),
        ({**NGRAM, **SYNTHETIC}, "synthetic_acceptance_rates or ..._length"),
        ({**NGRAM, **SYNTHETIC, "synthetic_acceptance_rates": [0.5]}, "must be 2 numbers"),
        ({**NGRAM, **SYNTHETIC, "synthetic_acceptance_rates": [0.5, 0.6]}, "none above the one before it"),
        ({**NGRAM, **SYNTHETIC, "synthetic_acceptance_length": 3.5}, "between 1 and 3"),
        ([1], "an object with vLLM's keys is needed"),
    ],
    ids=str,
)
def test_one_line_names_the_key(given: object, said: str) -> None:
    with pytest.raises(ValueError, match=r"^--speculative-config: ") as refused:
        speculation_of(given)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_flags_make_one_object() -> None:
    expected = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=2, prompt_lookup_max=2)
    for words in (
        ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2}'],
        ["-sc", '{"method": "ngram", "prompt_lookup_max": 2}', "--spec-tokens", "4"],
        ["--spec-method=ngram", "--spec-tokens", "4", "--speculative-config.prompt_lookup_max", "2"],
        ["-sc.num_speculative_tokens=4", "-sc.prompt_lookup_max=2", "--spec-model", "ngram"],
    ):
        config = config_of(*words)
        assert config.speculative_config == expected
        assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config
    assert config_of().speculative_config is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-pp", "2"], "--speculative-config does not work with --pipeline-parallel-size above 1"),
        (["--deterministic"], "--deterministic does not work with --speculative-config"),
    ],
)
def test_flags_that_exclude_it(words: list[str], said: str) -> None:
    assert config_of(*words).speculative_config is None
    with pytest.raises(ValueError, match=said):
        config_of(*words, "--spec-method", "ngram")


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}, "eagle3"),
        ({"architectures": ["DFlashDraftModel"]}, "dflash"),
        ({"model_type": "medusa"}, "medusa"),
        ({"model_type": "mlp_speculator"}, "mlp_speculator"),
        ({"model_type": "deepseek_mtp", "architectures": ["DeepSeekMTPModel"]}, "mtp"),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, "draft_model"),
        ([], "eagle"),
    ],
    ids=str,
)
def test_a_drafters_method_by_its_config(tmp_path, config: object, method: str) -> None:
    folder = tmp_path / "some-eagle-head"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    assert method_of(str(folder)) == method


def test_only_the_bundled_model_has_a_drafter_of_its_own() -> None:
    for method in ("draft_model", "eagle3"):
        drafts = EngineConfig(speculative_config=speculation_of({"method": method})).speculative_config
        assert drafts is not None and drafts.model is None and drafts.num_speculative_tokens == 3
        with pytest.raises(ValueError, match=f"^--speculative-config: {method} needs a model, a folder or hub id"):
            EngineConfig(model="a/b", speculative_config=drafts)


def test_bounds_by_batch_size() -> None:
    config = speculation_of({**NGRAM, "num_speculative_tokens": 7, PER_SIZE: [[1, 4, 9], [9, 16, 3], [17, 64, 0]]})
    assert config is not None
    assert [config.most_drafts(n) for n in (1, 4, 5, 8, 9, 16, 17, 500)] == [7, 7, 7, 7, 3, 3, 0, 0]
    config = SpeculativeConfig(method="ngram", disable_by_batch_size=8)
    assert [config.most_drafts(n) for n in (1, 8, 9)] == [15, 15, 0]
