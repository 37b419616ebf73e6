"""A worker of a server that drafts dies in the middle of an answer."""

import json
import os
import signal
from collections.abc import Iterator

import pytest
from serving import SMALL, Served, until

pytestmark = pytest.mark.slow

NGRAM = json.dumps({"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 1, "prompt_lookup_max": 4})
PROMPT = "red green blue red green blue red green"
LONG = {"max_tokens": 1200, "min_tokens": 1200}


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Served, Served]]:
    with Served(*SMALL) as plain, Served(*SMALL, "--speculative-config", NGRAM) as drafting:
        yield plain.ready(), drafting.ready()


def test_a_worker_killed_amid_windows_changes_no_token(both):
    plain, drafting = both
    whole = plain.text(PROMPT, **LONG)
    with drafting.stream(PROMPT, **LONG) as stream:
        begin = stream.wait_for_text()
        os.kill(drafting.pid_of("quire.workers"), signal.SIGKILL)
        until(lambda: drafting.metric("worker_restarts_total") == 1)
        assert begin + stream.text() == whole
