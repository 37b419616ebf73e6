"""Estimates with adapters: the bytes of their slots are those that a worker makes, and leave less for the KV cache."""

import json

import pytest
from inline_engine import InlineEngine
from peft_folders import write_adapter
from tiny_models import tiny_model

from quire.frontend.cli.estimate import estimate, text_of
from quire.frontend.cli.estimate_model import read_model
from quire.frontend.cli.estimate_sizes import EstimateError
from quire.frontend.cli.main import main
from quire.ipc.adapters import with_layers_of
from quire.ipc.config import EngineConfig
from quire.ipc.lora_flags import limits_of
from quire.workers.adapters.peft import read_adapter

pytestmark = pytest.mark.usefixtures("asked_here")  # test_estimate_families.py asks a process of its own

LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}


def found_for(folder, memory=0, **options):
    model, config = read_model(str(folder), None, None, None, {}), EngineConfig(model=str(folder), **options)
    return estimate(model, config, memory, available=8 << 30), model, config


def test_the_slots_are_a_workers(tmp_path):
    folder = tiny_model("llama")
    adapter = write_adapter(tmp_path / "a", folder, ("lm_head", "q_proj"))
    for modules in ([], [f"a={adapter}"]):
        found, model, config = found_for(folder, **LORA, lora_modules=modules)
        limits = with_layers_of(limits_of(config), [read_adapter(adapter, limits_of(config)) for _ in modules])
        slots = InlineEngine(folder, adapters=limits).adapters
        assert found.adapters_bytes == sum(weights.num_bytes for weights in slots.places.layers) > 0
        assert f"3 slots of {slots.slot_bytes / 1e6:.1f} MB" in text_of(found, model, config)
    assert limits.has_head, "an adapter of the start has it, so all slots do"


def test_the_kv_cache_of_a_gpu_has_the_rest():
    folder, gib = tiny_model("llama"), 1 << 30
    without, model, config = found_for(folder, memory=8 * gib)
    found, _, _ = found_for(folder, memory=8 * gib, **{**LORA, "max_loras": 1024})
    assert without.adapters_bytes == 0 and "adapters" not in text_of(without, model, config)
    less = without.kv_cache_bytes - found.kv_cache_bytes
    assert found.adapters_bytes > 10**7 and abs(less - found.adapters_bytes) < 2 * without.kv_bytes_per_token * found.block_size


def test_the_command_says_it_and_names_a_folder_that_is_no_adapter(tmp_path, capsys):
    folder = str(tiny_model("llama"))
    assert main(["estimate", folder, "--gpu", "L4", "--enable-lora", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["adapters_bytes"] > 0
    with pytest.raises(EstimateError, match="the folder has no adapter_config"):
        found_for(folder, **LORA, lora_modules=[f"a={tmp_path}"])
