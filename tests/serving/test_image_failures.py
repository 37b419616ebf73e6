"""An encoder that fails on one of two ranks, served whole: its request ends with an error, and streams beside it go on."""

import base64

import pytest
import seeing_model
from serving import SMALL, Served, ends_well

from quire.enginecore.failed_items import TEXTS

WORKER = "quire.workers"
GOOD = seeing_model.image(90, 60, 1)
FAULTY = """
import torch
from quire.workers.logits_processors.interface import LogitsProcessor
from quire.workers.models.transformers.tower import Tower

forward = Tower.forward

def failing(tower, tensors, sizes):
    rows = forward(tower, tensors, sizes)
    if Faulty.rank == 1 and len(rows) == 9:
        raise torch.OutOfMemoryError("of 139 GiB")
    return rows * float("inf") * 0 if Faulty.rank == 0 and len(rows) == 12 else rows

Tower.__call__ = failing

class Faulty(LogitsProcessor):
    \"\"\"Loaded by each worker: the encoder fails on images of 9 tokens on rank 1, and of 12 on rank 0.\"\"\"

    rank = None

    def __init__(self, vllm_config, device, is_pin_memory):
        Faulty.rank = vllm_config.parallel_config.rank

    def is_argmax_invariant(self):
        return True

    def update_state(self, batch_update):
        pass

    def apply(self, logits):
        return logits
"""


def part(image):
    text = base64.b64encode(seeing_model.png(image)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}


def chat(server, image, **more):
    messages = [{"role": "user", "content": [{"type": "text", "text": "hello"}, part(image)]}]
    body = {"messages": messages, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **more}
    return server.ask("POST", "/v1/chat/completions", body)


SEVERAL_RANKS = [pytest.param(ranks, marks=pytest.mark.slow) for ranks in (("-tp", "2"), ("-pp", "2"))]  # start longer


@pytest.mark.parametrize("ranks", [("-tp", "1"), *SEVERAL_RANKS])
def test_requests_fail_alone(tmp_path, ranks):
    """A request of one token fails, too: its only step is not taken before the workers have told of its runs."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    arguments = (*ranks, "--max-model-len", "512", "--logits-processors", f"{tmp_path / 'faulty.py'}:Faulty")
    with Served(str(seeing_model.seeing("qwen3-vl")), *SMALL, *arguments) as server:
        server.ready()
        want, before = chat(server, GOOD).json()["choices"][0], server.pids(WORKER)
        long = {"max_tokens": 450, "temperature": 0, "ignore_eos": True}
        memory, not_finite = seeing_model.image(84, 84, 3), seeing_model.image(112, 84, 4)
        for image, fault in ((memory, "memory"), (not_finite, "not_finite"), (memory, "memory")):
            stream = server.stream("hello world", **long)
            stream.wait_for_text()
            for more in ({}, {"max_tokens": 1}, {"stream": True}):
                answer = chat(server, image, **more)
                if fault == "memory" and ranks != ("-tp", "2"):  # no rank 1 with an encoder
                    assert answer.status == 200
                    continue
                if more.get("stream"):
                    assert b"media_failed" in answer.body
                    continue
                assert answer.status == 500 and answer.error["code"] == "media_failed"
                assert answer.error["message"].rstrip(".").lower() == TEXTS[fault].lower()
            assert ends_well(stream)
            assert chat(server, GOOD).json()["choices"][0] == want
        assert server.pids(WORKER) == before
        assert server.end() == 0
