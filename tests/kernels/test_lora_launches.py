"""Launches of a layer in steps with and without LoRA adapters, on a Hopper GPU that is simulated; attention is left out."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, pathlib, sys
import hopper_offline
import torch
from hopper_offline import ints, meta
from step_contexts import context_of
from triton.runtime.jit import JITFunction

from quire.ipc.adapters import AdapterLimits
from quire.kernels.linear import blas, linear
from quire.kernels.triton_support import dependent_launch, hopper
from quire.kernels.tuning.current import using
from quire.kernels.tuning.h200 import H200
from quire.workers.adapters.lora import CudaStepAdapters
from quire.workers.adapters.places import Places
from quire.workers.layers import ops
from quire.workers.models.build import build_model
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel

calls = []
JITFunction.run = lambda self, *args, **kwargs: calls.append(self.fn.__name__)
hopper.available = lambda device: True
dependent_launch.supported = lambda: True
dependent_launch._max_rows = lambda: 64
source = pathlib.Path(ops.__file__).read_text()
assert "x.is_cuda" in source
exec(compile(source.replace(".is_cuda", ".is_meta"), ops.__file__, "exec"), ops.__dict__)

def product(x, w, bias=None, out=None):
    calls.append("cuBLAS")
    return meta(len(x), len(w)) if out is None else out

def parts(x, w, count):
    calls.append("cuBLAS")
    return meta(count, len(x), len(w), dtype=torch.float32)

linear.blas_linear, blas.batched_split_k = product, parts
config, device = read_model_config(sys.argv[1]), torch.device("meta")
with device:
    model = build_model(config, torch.bfloat16, Parallel(0, 1, "meta"))
q_size = config.attention_specs(Parallel(0, 1, "meta"))[0].q_size

def launched(tokens):
    calls.clear()
    model(ints(tokens), context_of(lambda *args: meta(tokens, q_size), ints(tokens)), None)
    return list(calls)

found = {}
with using(H200):
    base = {tokens: launched(tokens) for tokens in (1, 64, 256)}
    steps = CudaStepAdapters(8, 256, device)
    Places(model, AdapterLimits(max_loras=8, max_rank=16), steps, torch.bfloat16, device)
    for tokens in base:
        steps.begin(None, None, tokens, tokens, False)
        assert launched(tokens) == base[tokens]  # a step without adapters
        steps.is_active = True
        found[tokens] = launched(tokens)
        steps.is_active = False
print(json.dumps([base, found]))
"""
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "vocab_size": 32_000,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 3,
}
LARGE = LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
SMALL = LLAMA | {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16}


@pytest.mark.slow  # a process that imports torch and quire
@pytest.mark.parametrize(
    ("config", "few"),
    [(LARGE, {1: 2, 64: 2, 256: 5}), (SMALL, {1: 11 / 3, 64: 2, 256: 5})],
    ids=["8B", "0.6B"],
)
def test_adapters_add_few_launches_to_a_layer(config, few, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    child = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr[-3000:]
    # qkv, and gate with up; with more rows than our products take also a shrink for each product, less the base's activation;
    # where norms are part of products also o and down, but for the last layer's
    base, found = json.loads(child.stdout.splitlines()[-1])
    added = {int(rows): (len(calls) - len(base[rows])) / 3 for rows, calls in found.items()}
    assert added == few
