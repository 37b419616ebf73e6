"""What a worker says that its answers follow from: values, not flags, so that two ways to say the same are the same."""

from typing import Any

import core_by_hand
import msgspec
import pytest
import torch
from tiny_models import tiny_model

from quire.enginecore.loading.model_files import BUNDLED
from quire.ipc.numerics import Numerics, differing_flags
from quire.workers.models.family_table import read_model_config
from quire.workers.numerics import numerics_of


def numerics(model: Any = BUNDLED, dtype: torch.dtype = torch.float32, *, read: dict[str, Any] | None = None, **config: Any):
    worker = msgspec.structs.replace(core_by_hand.worker_template().engine, **config)
    return numerics_of(worker, read_model_config(model, **(read or {})), dtype)


@pytest.mark.parametrize(
    ("other", "flags"),
    [
        ({"dtype": torch.bfloat16}, "--dtype (float32 and bfloat16)"),
        ({"read": {"quantization": "int8"}}, "--quantization (none and int8)"),
        ({"read": {"kv_cache_dtype": "fp8"}}, "--kv-cache-dtype (auto and fp8_e4m3)"),
        (
            {"read": {"kv_cache_dtype": "fp8_e5m2", "kv_cache_dtype_skip_layers": ["1"]}},
            "--kv-cache-dtype (auto and fp8_e5m2 but for layers 1)",
        ),
        ({"load_format": "dummy", "seed": 3}, "--load-format dummy with --seed (none and 3)"),
        ({"logits_processors": ["/a/b.py:Mine"]}, "--logits-processors (none and Mine)"),
        ({"seed": 3, "max_model_len": 100, "block_size": 32, "max_num_seqs": 2}, ""),
    ],
)
def test_what_differs_is_named_by_its_flag(other: dict[str, Any], flags: str) -> None:
    assert differing_flags(numerics(load_format="auto"), numerics(**{"load_format": "auto", **other})) == flags


def test_two_names_of_one_are_the_same() -> None:
    assert numerics(read={"quantization": "fp8"}) == numerics(read={"quantization": "fp8_per_tensor"})
    assert numerics(read={"kv_cache_dtype": "fp8"}) == numerics(read={"kv_cache_dtype": "fp8_e4m3"})
    assert numerics(logits_processors=["/a/b.py:Mine"]) == numerics(logits_processors=["b:Mine"])


def test_the_length_that_is_served_chooses_longropes_factors() -> None:
    short, long = (numerics(tiny_model("phi3-longrope"), max_model_len=length) for length in (512, 600))
    assert differing_flags(short, long).endswith("(short and long)")
    assert differing_flags(Numerics(), Numerics()) == ""
