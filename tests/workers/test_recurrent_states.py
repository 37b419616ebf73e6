"""Scheduler, plans and runner with a model whose only memory is its recurrent state: each token must come from its own."""

from types import MappingProxyType, SimpleNamespace

import msgspec
import pytest
import torch
from inline_engine import InlineEngine
from tiny_models import tiny_model

from quire.ipc.sampling import SamplingParams
from quire.workers.models.config import NO_ATTENTION, RecurrentSpec, StateTensor
from quire.workers.models.family_table import read_model_config

MODULUS = 1009


class Counting(RecurrentSpec, frozen=True):
    def tensors(self, parallel):
        return StateTensor((3,), True), StateTensor((1,), False)

    def kept_sizes(self, parallel):
        return ()


def after(value, token):
    """A state after one more token."""
    return (value * 31 + int(token) + 7) % MODULUS


class HashModel:
    """Its state is a hash of all tokens so far, in every element of every layer; it says the token that the hash names."""

    weights_bytes = 0
    has_head = True
    items = adapters = None

    def __init__(self, vocab, layers):
        self.vocab, self.layers = vocab, layers
        self.stage_buffer = SimpleNamespace(hidden=None)

    def kv_scales(self):
        return {}

    def appliers(self, buffers):
        return {}

    def compute_logits(self, hidden):
        return torch.nn.functional.one_hot(hidden[:, 0].long() % self.vocab, self.vocab).float()

    def __call__(self, ids, context, logits_indices=None):
        starts, decode = context.query_start.tolist(), int(context.decode_limit[0])
        hidden = torch.zeros(len(ids), 1)
        rows = [ids.tolist() for ids in (context.states.own, context.states.first, context.states.last)]
        for row, (own, first, last) in enumerate(zip(*rows, strict=True)):
            tokens = ids[starts[row] : starts[row + 1]].tolist()
            assert own == first or row >= decode
            values = (
                {float(t[first].flatten()[i]) for t in self.tensors_of(context) for i in range(t[0].numel())}
                if first
                else {0.0}
            )
            if not tokens:
                assert own == first == last == 0
                continue
            (value,) = values  # all layers' tensors agree
            for i, token in enumerate(tokens):
                value = after(value, token)
                hidden[starts[row] + i] = value
            for tensor in self.tensors_of(context):
                tensor[own] = value
                if last:
                    tensor[last] = value
        return hidden if logits_indices is None else hidden[logits_indices]

    def tensors_of(self, context):
        return [tensor for layer in range(self.layers) for tensor in context.states.tensors(layer)]


class HashEngine(InlineEngine):
    def read_config(self, model_dir, options):
        config = read_model_config(model_dir)
        layers = tuple(msgspec.structs.replace(layer, attention=NO_ATTENTION, recurrent=Counting()) for layer in config.layers)
        return msgspec.structs.replace(config, layers=layers)

    def load(self, config, dtype, parallel, model_dir):
        return HashModel(config.vocab_size, len(config.layers))


def expected(prompt, count, vocab):
    value, tokens = 0, list(prompt)
    for token in tokens:
        value = after(value, token)
    while len(tokens) < len(prompt) + count:
        tokens.append(value % vocab)
        value = after(value, tokens[-1])
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    "options",
    [
        {"budget": 100},
        {"budget": 48},
        {"max_num_seqs": 3, "num_states": 5},
        {"enable_prefix_caching": False},
        {"num_states": 3},
    ],
)
def test_each_sequence_goes_on_from_its_own_state(options):
    """Strangers, shared prefixes, prompts asked again, and answers long enough to leave checkpoints while decoding."""
    engine = HashEngine(
        tiny_model("llama"), num_blocks=1, max_model_len=512, **MappingProxyType({"max_num_seqs": 6, **options})
    )
    vocab = engine.model.vocab
    system = [(3 * i) % 90 + 1 for i in range(150)]
    prompts = [system + [i] * (9 * i + 1) for i in range(1, 7)] + [[5 + i] * (40 * i + 3) for i in range(5)]
    greedy = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    for _ in range(2):
        assert engine.generate(prompts, greedy) == [expected(prompt, 150, vocab) for prompt in prompts]
    cached = engine.scheduler.counters.cached_tokens
    assert cached > 500 if options.keys() <= {"budget"} and options["budget"] > 64 else cached >= 0
    continued = [prompt + expected(prompt, 150, vocab) + [7] for prompt in prompts[:3]]
    assert engine.generate(continued, greedy) == [expected(prompt, 150, vocab) for prompt in continued]
    engine.scheduler.check()
