"""A model on GPUs of two hosts, of which the other is an agent on loopback: by NCCL alone, tokens equal transformers'.

Needs two GPUs of one machine: the engine sees the first, the agent the second.
"""

import pytest
import torch
from gpu.test_gpu_engine import GREEDY, prompts, wrong_rows
from hosts import Agent, Keys
from serving import Served, ends_well, until
from tiny_models import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

ARGUMENTS = ("--device", "cuda", "--dtype", "float32", "--max-num-seqs", "16", "--max-num-batched-tokens", "256")
MEMORY = ("--kv-cache-memory-bytes", "64M", "--collective-timeout-s", "5")


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("layout", ["-tp", "-pp"])
def test_fp32_on_two_hosts_equals_transformers(layout, eager, tmp_path):
    keys, name = Keys(tmp_path), "gpu-llama"
    more = ("--enforce-eager",) if eager else ()
    with Agent(keys, "other", env={"CUDA_VISIBLE_DEVICES": "1"}) as other:
        flags = (layout, "2", *keys.flags(other), *more)
        with Served(str(tiny_model(name)), *ARGUMENTS, *MEMORY, *flags, env={"CUDA_VISIBLE_DEVICES": "0"}) as served:
            served.ready()
            body = {"max_tokens": GREEDY.max_tokens, "ignore_eos": True, "return_token_ids": True}
            for _ in range(2):  # the second from the prefix cache
                answer = served.complete([list(p) for p in prompts()], **body)
                assert wrong_rows(name, [choice["token_ids"] for choice in answer["choices"]]) == []
            stream = served.stream([5, 6, 7, 8], max_tokens=400, ignore_eos=True)
            next(iter(stream))
            other.worker().kill()
            assert ends_well(stream)
            served.line(f"on host {other.address} ended unexpectedly")
            until(lambda: served.health() == 200)
            answer = served.complete([list(p) for p in prompts()], **body)
            assert wrong_rows(name, [choice["token_ids"] for choice in answer["choices"]]) == []
            assert served.end() == 0
        assert other.end() == 0
