"""The tiny model's training data: a tokenizer trained on tiny_data's text, and rows of its token ids.

Processes write rows as long as they are needed. Documents are packed into rows of two lengths. A row is int16: token ids, with
LOSS_BIT for tokens to learn. Everything depends only on the seed. Used by train_tiny.py.
"""

import itertools
import json
import multiprocessing
import os
import random
from dataclasses import dataclass

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the data processes are forked: no thread pool of tokenizers in the parent

import numpy as np
import tiny_data
import tiny_words
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SHORT, LONG = 512, 2048  # row lengths
LOSS_BIT = 1 << 14
SHARD_DOCUMENTS = 2000
PRE_TOKENS = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # a digit is always a token of its own


# ---------------------------------------------------------------- tokenizer


def build_tokenizer(seed, size, documents):
    """A byte-level BPE tokenizer as JSON. Encoding adds BOS in front unless add_special_tokens is off (as Llama 3's does)."""
    rng = random.Random(f"tokenizer {seed}")
    texts = ["".join(text for text, _ in tiny_data.document(rng)) for _ in range(documents)]
    for special in (*tiny_data.SPECIAL_TOKENS, *tiny_data.CALL_TOKENS):
        texts = [text.replace(special, "\n") for text in texts]
    known = (*tiny_words.WORDS, *tiny_words.NAMES, *tiny_words.CITIES, *tiny_words.CAPITALS)
    texts += [f"{word} {word}" for word in known for _ in range(documents // 50)]  # one token, with or without a space
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PRE_TOKENS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    named = [AddedToken(token, normalized=False) for token in (*tiny_data.SPECIAL_TOKENS, *tiny_data.CALL_TOKENS)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=named, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    bos = tiny_data.BOS
    tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] in tiny_data.SPECIAL_TOKENS  # a client must see <tool_call>
    return json.dumps(state, ensure_ascii=False)


def check_tokenizer(tokenizer, seed):
    """Check that texts survive a round trip, and that a document's pieces encode like the whole. Returns a text to
    log."""
    for text in (
        "Héllo, wörld! 你好 🙂\n\n\ttabs  and   spaces ",
        "x" * 50,
        "\x00\x7f",
        " 12 345",
        "<tool_call>\n{}\n</tool_call>",
    ):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text, text
    rng = random.Random(f"check {seed}")
    for _ in range(300):
        pieces = tiny_data.document(rng)
        whole = tokenizer.encode("".join(text for text, _ in pieces), add_special_tokens=False).ids
        assert whole == [i for text, _ in pieces for i in tokenizer.encode(text, add_special_tokens=False).ids], pieces
    forms = [form for word in tiny_words.WORDS for form in (word, " " + word)]
    whole = sum(len(tokenizer.encode(form, add_special_tokens=False).ids) == 1 for form in forms)
    return f"tokenizer: {tokenizer.get_vocab_size()} tokens, {whole} of {len(forms)} word forms are one token"


# ---------------------------------------------------------------- data: processes that write rows


def encode_documents(tokenizer, rng, count):
    """[int16 ids with LOSS_BIT], one array per document, at most LONG long."""
    documents = [tiny_data.document(rng) for _ in range(count)]
    flat = [piece for document in documents for piece in document]
    encoded = iter(tokenizer.encode_batch_fast([text for text, _ in flat], add_special_tokens=False))
    out = []
    for document in documents:
        ids = [i | LOSS_BIT if has_loss else i for _, has_loss in document for i in next(encoded).ids]
        out.append(np.array(ids[:LONG], np.int16))
    return out


@dataclass(eq=False)
class OpenRow:
    documents: list
    room: int


def pack(documents):
    """[short rows, long rows]: whole documents side by side, padded with id 0. Long rows begin with a document over SHORT."""
    rows, opened = {SHORT: [], LONG: []}, {SHORT: [], LONG: []}

    def close(length, row):
        opened[length].remove(row)
        ids = np.concatenate(row.documents)
        rows[length].append(np.pad(ids, (0, length - len(ids))))

    for document in documents:
        length = LONG if len(document) > SHORT else SHORT
        fits = [row for row in opened[length] if row.room >= len(document)]
        row = min(fits, key=lambda row: row.room) if fits else OpenRow([], length)
        if not fits:
            opened[length].append(row)
        row.documents.append(document)
        row.room -= len(document)
        if row.room < 16 or len(opened[length]) > 16:
            close(length, min(opened[length], key=lambda row: row.room))
    for length in (SHORT, LONG):
        for row in list(opened[length]):
            close(length, row)
    return [np.stack(rows[length]) if rows[length] else np.zeros((0, length), np.int16) for length in (SHORT, LONG)]


def produce(tokenizer_json, seed, worker, queue):
    """A data process: makes shards endlessly, each from its own seed."""
    os.nice(10)
    tokenizer = Tokenizer.from_str(tokenizer_json)
    for shard in itertools.count():
        rng = random.Random(f"{seed} {worker} {shard}")
        queue.put(pack(encode_documents(tokenizer, rng, SHARD_DOCUMENTS)))


class Rows:
    """Rows of one length on the device; when full, new rows replace the oldest. A row is drawn some three times per run."""

    def __init__(self, length, capacity, device):
        self.data = torch.zeros(capacity, length, dtype=torch.int16, device=device)
        self.seen = 0

    def add(self, rows):
        at = (self.seen + torch.arange(len(rows))) % len(self.data)
        self.data[at.to(self.data.device)] = torch.from_numpy(rows).to(self.data.device)
        self.seen += len(rows)

    def draw(self, count, generator):
        at = torch.randint(min(self.seen, len(self.data)), (count,), generator=generator, device=self.data.device)
        return self.data[at]


class Feed:
    """The data processes and the rows they have written. Shards are taken in a fixed order, worker after worker."""

    def __init__(self, tokenizer_json, args, device):
        context = multiprocessing.get_context("fork")
        self.queues = [context.Queue(2) for _ in range(args.workers)]
        self.workers = [
            context.Process(target=produce, args=(tokenizer_json, args.seed, i, queue), daemon=True)
            for i, queue in enumerate(self.queues)
        ]
        for worker in self.workers:
            worker.start()
        self.device, self.next, self.rows = device, 0, {}
        self.capacity = 1_200_000 if args.device == "cuda" else 20_000

    def allocate(self):
        """Allocate rows. Call it after the fork, as it starts CUDA."""
        self.rows = {SHORT: Rows(SHORT, self.capacity, self.device), LONG: Rows(LONG, self.capacity // 8, self.device)}

    def take(self, shards):
        """Move up to `shards` ready shards to the device."""
        for _ in range(shards):
            if self.queues[self.next].empty():
                return
            self.take_one()

    def take_one(self):
        for rows in self.queues[self.next].get():
            self.rows[rows.shape[1]].add(rows)
        self.next = (self.next + 1) % len(self.queues)

    def stop(self):
        for worker in self.workers:
            worker.terminate()
