"""Models that `--deterministic` refuses: a wrong answer to "is it the same" would be silent."""

import pytest
import torch
from tiny_models import tiny_model

from quire.kernels.tuning.current import current, using
from quire.kernels.tuning.default import DEFAULT
from quire.workers.fixed_order import fix_order
from quire.workers.models.config import ModelConfigError
from quire.workers.models.family_table import read_model_config

GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def any_table():
    with using(DEFAULT):
        yield


def test_a_dense_model_gets_the_table():
    fix_order(read_model_config(tiny_model("llama")), GPU)
    assert current().fixed_order


@pytest.mark.parametrize(
    ("name", "options", "device", "named"),
    [
        ("llama", {}, torch.device("cpu"), "a CPU"),
        ("llama", {"quantization": "fp8"}, GPU, r"quantized weights \(fp8\)"),
        ("llama", {"kv_cache_dtype": "fp8"}, GPU, "a KV cache of 8 bits"),
        ("llama", {"model_impl": "transformers"}, GPU, "transformers' model code"),
        ("deepseek-v3", {}, GPU, r"latent attention \(DeepseekV3ForCausalLM\)"),
        ("qwen3.5", {}, GPU, r"recurrent layers \(Qwen3_5ForCausalLM\)"),
    ],
)
def test_others_are_refused_by_name(name, options, device, named):
    with pytest.raises(ModelConfigError, match=f"--deterministic does not work with {named}; leave it out"):
        fix_order(read_model_config(tiny_model(name), **options), device)
    assert not current().fixed_order
