"""Launch lines as model cards, vLLM's recipes and its documentation have them: taken whole, or refused for one said reason.

No line is refused for the name of a parser, nor for a flag that says only how vLLM gets to the same answers.
"""

import json
import shlex
from pathlib import Path

import pytest
from launch_lines import parsed

from quire.ipc.config import engine_config_from

TAKEN = (Path(__file__).parent / "public_lines.txt").read_text().splitlines()

REFUSED = {
    'm --kv-transfer-config \'{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}\'': "KV blocks stay in their engine",
    "m --kv-offloading-size 20": "weights and KV cache stay on the GPU",
    "m --logprobs-mode processed_logprobs": "logprobs are those before penalties and temperature",
    "m --prefill-context-parallel-size 2": "sequences stay together",
    "m --data-parallel-size 4 --data-parallel-address 10.0.0.1 --data-parallel-size-local 2": "all of one host",
    "m --structured-outputs-config '{\"enable_in_reasoning\":true}'": "llguidance makes the masks",
    "m --guided-decoding-disable-any-whitespace": "llguidance makes the masks",
}


@pytest.mark.parametrize("line", TAKEN, ids=lambda line: " ".join(line.split()[:3]))
def test_a_public_line_is_taken(line):
    assert parsed(*shlex.split(line)).model == line.split()[0]


def test_drafters_that_are_not_served_are_refused_by_name():
    args = parsed(*shlex.split("GLM --speculative-config.method mtp --speculative-config.num_speculative_tokens 1"))
    speculation = engine_config_from(args).speculative_config
    assert speculation is not None and (speculation.method, speculation.num_speculative_tokens) == ("mtp", 1)
    args = parsed(*shlex.split("Llama --speculative-config.method eagle --speculative-config.model a/b"))
    with pytest.raises(ValueError, match="method 'eagle' is not served yet"):
        engine_config_from(args)


@pytest.mark.parametrize("line", REFUSED, ids=lambda line: " ".join(line.split()[1:3]))
def test_what_cannot_be_honored_has_a_reason(line, capsys):
    with pytest.raises(SystemExit):
        parsed(*shlex.split(line))
    said = capsys.readouterr().err
    assert REFUSED[line] in said and said.count("\n") == 1


def test_flags_of_rope_become_overrides_of_the_config():
    yarn = {"rope_type": "yarn", "factor": 4.0}
    args = parsed("m", "--rope-scaling", json.dumps(yarn), "--rope-theta=1e6", "--hf-overrides", '{"a": 1}')
    assert args.hf_overrides == {"rope_scaling": yarn, "rope_theta": 1e6, "a": 1}
    assert [note.split()[0] for note in args.notes] == ["--rope-scaling", "--rope-theta"]
    with pytest.raises(SystemExit):
        parsed("m", "--rope-scaling")
