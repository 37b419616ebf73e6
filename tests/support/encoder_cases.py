"""Tiny random encoders as transformers saves them, and the same ones as Quire runs them."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quire.workers.loading.weights import load_weights
from quire.workers.models.encoder import Encoder, hidden_states
from quire.workers.models.encoders.table import build_encoder, read_encoder_config
from quire.workers.parallel import Parallel

VOCAB, HIDDEN, LAYERS, HEADS, INNER, POSITIONS = 96, 32, 3, 4, 48, 64
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "max_position_embeddings": POSITIONS,
}


class Pair(NamedTuple):
    theirs: Any  # transformers' model
    ours: Encoder


def randomized(model: Any) -> Any:
    """The model with large random weights in all tensors: small ones hide what attention does, and biases of 0 what is lost."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_scale = parameter.dim() == 1 and name.endswith("weight") and not model.config.model_type.startswith("gemma")
            parameter.normal_(1.0 if is_scale else 0.0, 0.3 if parameter.dim() > 1 else 0.2, generator=generator)
    return model.eval()


def build(cls: Any, config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        return randomized(cls._from_config(config, attn_implementation="eager", dtype=torch.float32))


def loaded(folder: Path, changes: dict[str, Any] | None = None, parallel: Parallel | None = None) -> Encoder:
    """Quire's encoder of a folder; changes: of config.json's fields."""
    fields = {**json.loads((folder / "config.json").read_text()), **(changes or {})}
    config = read_encoder_config(fields, fields["architectures"][0])
    model = build_encoder(config, torch.float32, parallel or Parallel())
    load_weights(model, folder, "cpu", progress=False)
    return model


def pair(cls: Any, config: Any, folder: Path, changes: dict[str, Any] | None = None) -> Pair:
    theirs = build(cls, config)
    theirs.save_pretrained(folder)
    return Pair(theirs, loaded(folder, changes))


def texts(lengths: list[int], first: int = 5) -> list[list[int]]:
    """Rows of random ids of at least `first`, so that none is a padding token."""
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(first, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def types_of(rows: list[list[int]]) -> list[list[int]]:
    """Token types of pairs: the second half of each row is the second text."""
    return [[int(i >= len(row) // 2) for i in range(len(row))] for row in rows]


@torch.no_grad()
def their_hidden(model: Any, row: list[int], types: list[int] | None = None) -> torch.Tensor:
    more = {} if types is None else {"token_type_ids": torch.tensor([types])}
    return model(input_ids=torch.tensor([row]), **more).last_hidden_state[0]


@torch.no_grad()
def our_hidden(model: Encoder, rows: list[list[int]], types: list[list[int]] | None = None) -> list[torch.Tensor]:
    return list(hidden_states(model, rows, types).split([len(row) for row in rows]))


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(VOCAB - 5))]


def add_tokenizer(folder: Path) -> Any:
    """A BERT tokenizer, of whole words, with the types that BERT's writes; returns it."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    made = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.add_special_tokens(WORDS[:5])
    made.save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": "BertTokenizer", "model_max_length": POSITIONS, "cls_token": "[CLS]", "sep_token": "[SEP]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return made
