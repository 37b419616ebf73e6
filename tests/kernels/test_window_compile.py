"""Kernels of steps with windows for a Hopper GPU that is simulated: they compile, once for all padded sizes."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import hopper_offline
hopper_offline.HOW()
import json, torch
from hopper_offline import COMPILED, KEYS, ints, meta
from quire.ipc.step.sections import result_words
from quire.kernels.attention.latent_decode import latent_decode
from quire.kernels.attention.latent_prefill import latent_prefill
from quire.kernels.sampling import sampler
from quire.kernels.recurrent import convolution, delta, mamba
from quire.kernels.recurrent.convolution_reference import Gates
from quire.kernels.recurrent.delta_reference import DeltaHeads, DeltaInputs, DeltaWeights
from quire.kernels.recurrent.mamba_reference import MambaHeads, MambaInputs, MambaWeights
from quire.kernels.recurrent.rows import Rows, Windows
from quire.kernels.speculation import accept, draft_passes, features, ngram
from quire.kernels.speculation.draft_state import DraftState
from quire.kernels.step import step_inputs, step_states
from quire.kernels.step.tables import (
    KeptTables,
    LogitsProcessorPool,
    SamplerWorkspace,
    SlotTables,
    StateRows,
    StepBuffers,
    WindowIds,
)
rows, vocab, most = 64, 1000, 512
tables = SlotTables.allocate(rows, 2, 40, "meta", speculates=True)
pool = LogitsProcessorPool.allocate(rows, vocab, 1000, "meta")
step, text = StepBuffers.allocate(600, rows, 2, "meta", most), ints(99 * 64)
inputs, state = StepBuffers.allocate(600, most, 1, "meta"), DraftState.allocate(99, 64, most, "meta")
results, space = meta(2, result_words(rows, 20, most), dtype=torch.int64), SamplerWorkspace.allocate(most, vocab, "meta")
q, cache, out = meta(most, 16, 576), meta(99, 1, 64, 576), meta(most, 16, 512)

kept, states, wide = KeptTables.allocate(rows + 1, most, "meta"), StateRows.allocate(most, "meta"), torch.float32

def recurrent(n):
    step_states.prepare_states(ints(6000), tables, step, states, n)
    step_states.begin_kept(ints(6000), kept)
    step_states.end_kept(step, kept, n)
    of_slots = kept.num_kept, kept.first_kept, tables.seq_len, kept.keep_at, kept.keep_state, kept.base
    own, first, last = states.own[:n], states.first[:n], states.last[:n]
    def rows_of(*sizes):
        windows = Windows(step.row_slots[:n], *of_slots, tuple(meta(2 * most, size) for size in sizes))
        return Rows(step.query_start[: n + 1], own, first, last, ints(1), ints(n), n, windows)
    for heads in (DeltaHeads(16, 32, 128, 128), DeltaHeads(32, 32, 128, 128, by_channel=True)):
        c, found = heads.channels, rows_of(heads.channels, heads.channels, heads.num_values + heads.num_decays)
        qkv = convolution.causal_convolution(meta(n, c), meta(4, c), None, meta(9, 3, c), found)
        inputs = DeltaInputs(qkv, meta(n, heads.value_size), meta(n, heads.num_values), meta(n, heads.num_decays))
        of_heads, of_decays = meta(heads.num_values, dtype=wide), meta(heads.num_decays, dtype=wide)
        weights = DeltaWeights(of_heads, of_decays, meta(128), 1e-6)
        for dtype in (wide, torch.float16):
            matrices = meta(9, heads.num_values, 128, 128, dtype=dtype)
            delta.gated_delta(inputs, weights, heads, matrices, found)
            for pdl in (1, 2):
                delta.gated_delta(inputs, weights, heads, matrices, found, pdl=pdl, config=delta.Config(32, 4))
    heads, of_heads = MambaHeads(8, 64, 128, 64), meta(64, dtype=wide)
    found = rows_of(heads.channels, heads.channels, 64)
    xbc = convolution.causal_convolution(meta(n, heads.channels), meta(4, heads.channels), meta(heads.channels),
                                         meta(9, 3, heads.channels), found)
    weights = MambaWeights(of_heads, of_heads, of_heads, meta(4096), 1e-6, 512)
    inputs, matrices = MambaInputs(xbc, meta(n, 4096), meta(n, 64)), meta(9, 64, 128, 64, dtype=wide)
    for pdl in (0, 1, 2):
        mamba.mamba(inputs, weights, heads, matrices, found, pdl=pdl)
    x, gate = meta(n, 2048), meta(n, 2048)
    for pdl in (0, 1, 2):
        convolution.causal_convolution(x, meta(3, 2048), None, meta(9, 2, 2048), rows_of(2048), Gates(gate, gate), pdl=pdl)

def run(n):
    recurrent(n)
    step_inputs.prepare_step(ints(6000), tables, step, n, n, block_size=64, num_blocks=99, vocab=vocab, windows=True)
    lengths = step.query_start[: n + 1], step.seq_lens[:n]
    latent = q, cache, ints(65, 40), step.row_slots[:n], *lengths, out
    latent_decode(*latent, scale=0.1, limit=ints(1), max_query_len=16)
    latent_decode(*latent, scale=0.1, limit=ints(1), max_query_len=16, hides_first=True)
    latent_decode(*latent, scale=0.1, hides_first=True)
    latent_prefill(*latent, scale=0.1, hides_first=True)
    slots, window = step.sample_slots[:n], WindowIds(step.input_ids, step.sample_places[:n])
    given = slots, step.sample_positions[:n], tables, pool, space
    sampled = sampler.sample(meta(n, vocab), *given, random=True, processors=True, window=window)
    accept.accept(step, sampled, n)
    columns = meta(n, dtype=torch.float32), ints(n), ints(n, 20), meta(n, 20, dtype=torch.float32)
    how = {"max_rows": rows, "max_samples": most, "logprobs": columns, "windows": True}
    step_inputs.finish_step(ints(6000), tables, pool, step, sampled, results, n, **how)
    ngram.write_text(step, text, 1, n)
    ngram.draft_ngrams(tables, step, text, 1, n, block_size=64, min_n=5, max_n=5, num_drafts=15)
    draft_passes.begin_sequences(ints(6000), tables, state, 1)
    draft_passes.note_tokens(step, state, 1, n, block_size=64)
    how = {"block_size": 64, "vocab": vocab}
    draft_passes.begin_pass(tables, step, state, inputs, 1, n, n, depth=n % 15, longest=2000 + n, **how)
    features.read_features(tables, step, inputs, meta(n, 4096), meta(99, 4096), 1, n, n, 64)
    window = WindowIds(state.ids.view(-1), state.places[:n], 16)
    given = state.slots[:n], state.positions[:n], tables, pool, space
    sampled = sampler.sample(meta(n, vocab), *given, random=True, filtered=True, processors=True, window=window)
    draft_passes.next_drafts(tables, state, inputs, 1, sampled, n % 15, n, **how)

run(2)
first = set(KEYS)
for n in SIZES:
    run(n)
print(json.dumps([len(COMPILED), len(first), sorted(name for name, _ in KEYS - first)]))
"""


def found_by(how, sizes, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    program = PROGRAM.replace("HOW", how).replace("SIZES", str(sizes))
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout.splitlines()[-1])


@pytest.mark.slow  # a process that imports torch and quire
def test_padded_sizes_share_compiled_kernels(tmp_path, monkeypatch):
    _, kernels, more = found_by("look_up_launches", [3, 16, 17, 64, 512], tmp_path, monkeypatch)
    assert kernels > 10
    # whether keys are split, and how many columns of a state a program has at once, which are met before serving
    split = {"_several_kernel", "_combine_several_kernel", "_decode_kernel", "_combine_kernel"}
    assert set(more) <= split | {"_windows_kernel"}


@pytest.mark.slow  # half a minute of compiling
def test_all_kernels_compile_for_a_hopper(tmp_path, monkeypatch):
    compiled, _, _ = found_by("compile_launches", [], tmp_path, monkeypatch)
    assert compiled > 10
