"""A worker of a server that drafts dies in the middle of an answer."""

import json
import os
import signal
from collections.abc import Iterator

import pytest
from serving import SMALL, Served, until
from tiny_models import tiny_model

pytestmark = pytest.mark.slow

NGRAM = json.dumps({"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 1, "prompt_lookup_max": 4})
PROMPT = "red green blue red green blue red green"
CONTEXT = ("--hf-overrides", '{"max_position_embeddings": 2048}', "--block-size", "16")


@pytest.fixture(scope="module", params=["bundled", "qwen3.5"])
def both(request) -> Iterator[tuple[Served, Served]]:
    """Without drafts, and with them. The second model has recurrent layers."""
    model = () if request.param == "bundled" else (str(tiny_model(request.param)), *CONTEXT)
    with Served(*model, *SMALL) as plain, Served(*model, *SMALL, "--speculative-config", NGRAM) as drafting:
        yield plain.ready(), drafting.ready()


def test_a_worker_killed_amid_windows_changes_no_token(both):
    plain, drafting = both
    length = {"max_tokens": 1200, "min_tokens": 1200, "ignore_eos": True}
    whole = plain.text(PROMPT, **length)
    with drafting.stream(PROMPT, **length) as stream:
        begin = stream.wait_for_text()
        os.kill(drafting.pid_of("quire.workers"), signal.SIGKILL)
        until(lambda: drafting.metric("worker_restarts_total") == 1)
        assert begin + stream.text() == whole
