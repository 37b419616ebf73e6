"""The replay engine and what frontend.py measures with it."""

import json

import numpy as np
import pytest
import replay_engine
from frontend_load import STAMPS, stamp_tokens
from nasty_requests import CASES
from replay_engine import FILES, ReplayEngine
from tokenizers import Tokenizer as Backend

import frontend
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.messages.frontend import AddRequest, Generate, TokenInputs
from quire.ipc.sampling import SamplingParams


@pytest.fixture
def engine():
    made = ReplayEngine(None, 0.0, FILES["bundled"](), 1000, phases=2)
    made.sent = []
    made._link.send = lambda identity, message: made.sent.append(message)
    yield made
    made._link.close(linger_s=0.0)


def ask(request_id: int, num_prompt: int, **params) -> AddRequest:
    return AddRequest(1, request_id, TokenInputs(bytes(4 * num_prompt)), Generate(SamplingParams(**params)))


def test_sequences_say_a_token_in_each_step_of_their_phase_to_their_end(engine):
    engine._take(b"f", ask(2, 3, n=2, max_tokens=3, logprobs=4))
    engine._take(b"f", ask(3, 5, max_tokens=None, prompt_logprobs=2))
    assert len(engine.sent.pop().ranks) == 4 * 4
    for _ in range(8):
        engine._next_stamp()
        engine._step(b"f", engine._running[b"f"])
    steps = [np.frombuffer(message.keys, "<i8").tolist() for message in engine.sent]
    assert steps[:4] == [[3 << 8], [2 << 8, 2 << 8 | 1], [3 << 8], [2 << 8, 2 << 8 | 1]] and len(steps) == 7
    assert [len(message.logprobs) for message in engine.sent[:2]] == [0, 2]
    assert [end.key for message in engine.sent for end in message.finished] == [2 << 8, 2 << 8 | 1]
    assert len(engine.sent[1].logprobs[0].top_ids) == 16
    assert engine._running[b"f"].rows[2].tolist() == [1000 - 5 - 4]


@pytest.mark.slow
def test_the_large_vocabulary_is_a_tokenizer():
    files = replay_engine.large_files()
    tokenizer = Tokenizer.from_files(files)
    assert tokenizer.vocab_size == 1 << 17
    text = "The quick brown fox, and others."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert len(stamp_tokens(Backend.from_str(files["tokenizer.json"].decode()))) == STAMPS


def test_nasty_requests_can_be_made():
    for nasty in CASES.values():
        made = nasty.body()
        assert made if isinstance(made, bytes) else len(json.dumps(made)) < 8 << 20


@pytest.mark.slow
def test_a_token_and_a_gap_are_measured(capsys):
    frontend.main(["--quick", "--parts", "token", "gaps", "--servers", "quire", "--vocabulary", "bundled", "--clients", "1"])
    result = json.loads(capsys.readouterr().out.rpartition("RESULT ")[2])
    assert result["token"]["quire"]["chat"]["us"] > 0
    assert result["gaps"]["quire"]["3 M empty lists"]["status"] == 400
