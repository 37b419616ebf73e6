"""Flags that `--deterministic` does not allow are named, all at once."""

import pytest

from quire.ipc.config import EngineConfig


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"device": "cpu"}, "--device cpu"),
        ({"tensor_parallel_size": 4}, "--tensor-parallel-size over 2"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, "--enable-expert-parallel"),
        ({"quantization": "fp8", "kv_cache_dtype": "fp8"}, "--quantization, --kv-cache-dtype"),
        ({"model_impl": "transformers"}, "--model-impl transformers"),
    ],
)
def test_what_has_no_fixed_order_is_refused_by_name(options, named):
    EngineConfig(**options)
    with pytest.raises(ValueError, match=f"--deterministic does not work with {named}:"):
        EngineConfig(deterministic=True, **options)


def test_two_ranks_and_two_engines_are_allowed():
    EngineConfig(deterministic=True, tensor_parallel_size=2, data_parallel_size=2)
