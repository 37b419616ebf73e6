"""Trains the tiny model that ships inside Quire: a Llama of under 4M parameters and its tokenizer, in minutes on one GPU.

    python benchmarks/train_tiny.py --minutes 7.5 --out enginecore/loading/bundled      # a GPU, 16 cores
    python benchmarks/train_tiny.py --tiny --minutes 1 --out /tmp/tiny          # the same path on a CPU, to see it run

One command does it all: a byte-level BPE tokenizer on tiny_data's text; background processes that write and pack documents
while the GPU trains; a folder in Hugging Face format (bf16); exact-match scores through accuracy.py, in fp32 and in bf16.
Documents are packed into rows and attend only within themselves, at positions that begin at 0: what is trained is what is
served. --minutes is the wall clock from the start to the end of training; the learning rate follows the clock. Data and
initial weights are seeded; the number of steps is the machine's. --checkpoint keeps fp32 weights, --resume starts from them.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the data processes are forked: no thread pool of tokenizers in the parent

import numpy as np
import tiny_data
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn

SHORT, LONG = 512, 2048  # row lengths; every LONG_EVERY-th step takes rows of the second kind
LONG_EVERY = 6
LOSS_BIT = 1 << 14  # rows are int16: a token id, and this bit where the token is to be learnt
SHARD_DOCUMENTS = 2000
PRE_TOKENS = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # a digit is always a token of its own
MAX_BYTES = 8_000_000
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Shape:
    """The names of config.json."""

    vocab_size: int = 2816
    hidden_size: int = 256
    intermediate_size: int = 448
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = LONG
    rms_norm_eps: float = 1e-5


# ---------------------------------------------------------------- tokenizer


def build_tokenizer(seed, size, documents):
    """A byte-level BPE tokenizer as JSON. Encoding puts BOS in front unless add_special_tokens is off (as Llama 3's does)."""
    rng = random.Random(f"tokenizer {seed}")
    texts = ["".join(text for text, _ in tiny_data.document(rng)) for _ in range(documents)]
    for special in (*tiny_data.SPECIAL_TOKENS, *tiny_data.CALL_TOKENS):
        texts = [text.replace(special, "\n") for text in texts]
    known = (*tiny_data.WORDS, *tiny_data.NAMES, *tiny_data.CITIES, *tiny_data.CAPITALS)
    texts += [f"{word} {word}" for word in known for _ in range(documents // 50)]  # one token, with a space before or not
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
    """Any text survives a round trip, and a document's pieces encode to what the whole text does."""
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
    forms = [form for word in tiny_data.WORDS for form in (word, " " + word)]
    whole = sum(len(tokenizer.encode(form, add_special_tokens=False).ids) == 1 for form in forms)
    log(f"tokenizer: {tokenizer.get_vocab_size()} tokens, {whole} of {len(forms)} word forms are one token")


# ---------------------------------------------------------------- data: processes that write rows


def encode_documents(tokenizer, rng, count):
    """[int16 ids with LOSS_BIT], one array a document, at most LONG long."""
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
    """A data process: shards for ever, each from its own seed."""
    os.nice(10)
    tokenizer = Tokenizer.from_str(tokenizer_json)
    for shard in itertools.count():
        rng = random.Random(f"{seed} {worker} {shard}")
        queue.put(pack(encode_documents(tokenizer, rng, SHARD_DOCUMENTS)))


class Rows:
    """Rows of one length on the device; when full, new ones replace the oldest. A row is drawn some three times in a run."""

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
        """After the fork, for it starts CUDA."""
        self.rows = {SHORT: Rows(SHORT, self.capacity, self.device), LONG: Rows(LONG, self.capacity // 8, self.device)}

    def take(self, shards):
        """Moves up to `shards` that are ready to the device."""
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


# ---------------------------------------------------------------- model: Llama, under the names of a checkpoint


class Norm(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(shape.hidden_size)), shape.rms_norm_eps

    def forward(self, x):
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj, self.o_proj = nn.Linear(shape.hidden_size, q, bias=False), nn.Linear(q, shape.hidden_size, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(shape.hidden_size, kv, bias=False) for _ in range(2))

    def forward(self, x, cos, sin, mask):
        batch, length, _ = x.shape
        q, k, v = (
            project(x).view(batch, length, -1, self.shape.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


def rotate(x, cos, sin):
    """Rotary embedding of [batch, heads, length, head_dim], halves side by side (arXiv:2104.09864, as Llama's checkpoints)."""
    left, right = x.chunk(2, -1)
    return (x * cos + torch.cat((-right, left), -1) * sin).to(x.dtype)


class Mlp(nn.Module):
    def __init__(self, shape):
        super().__init__()
        sizes = shape.hidden_size, shape.intermediate_size
        self.gate_proj, self.up_proj = nn.Linear(*sizes, bias=False), nn.Linear(*sizes, bias=False)
        self.down_proj = nn.Linear(*sizes[::-1], bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(shape), Norm(shape)
        self.self_attn, self.mlp = Attention(shape), Mlp(shape)

    def forward(self, x, cos, sin, mask):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Tiny(nn.Module):
    """rows [batch, length] of int16 -> mean loss over the tokens marked with LOSS_BIT."""

    def __init__(self, shape, bos):
        super().__init__()
        self.bos = bos
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape)
        inverse = 10000.0 ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        self.register_buffer("inverse_frequency", inverse, persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.04 / math.sqrt(2 * shape.num_hidden_layers) if deep else 0.04)

    def forward(self, rows):
        ids = (rows & (LOSS_BIT - 1)).long()
        index = torch.arange(ids.shape[1], device=ids.device)
        start = torch.where(ids == self.bos, index, 0).cummax(1).values  # where a token's document begins
        angle = (index - start).float()[..., None] * self.inverse_frequency
        angle = torch.cat((angle, angle), -1)[:, None]
        cos, sin = angle.cos(), angle.sin()
        mask = ((start[:, :, None] == start[:, None]) & (index[:, None] >= index))[:, None]
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        logits = F.linear(self.norm(x), self.embed_tokens.weight)[:, :-1]
        target = torch.where((rows & LOSS_BIT) > 0, ids, -100)[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), ignore_index=-100)


# ---------------------------------------------------------------- training


def learning_rate(args, step, done):
    """Warm-up by steps, then flat, then linear to zero over the last two fifths of the time. `done` is in 0..1."""
    return args.lr * min(1, (step + 1) / args.warmup) * min(1, max(0.0, 1 - done) / 0.4)


def make_optimizer(model, args, device):
    matrices = [weight for name, weight in model.named_parameters() if weight.dim() == 2 and "embed" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.dim() != 2 or "embed" in name]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), eps=1e-9, fused=device.type == "cuda")


def step_loss(forward, rows):
    with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.device.type == "cuda"):
        return forward(rows)


def compiled(model, args, device):
    """The compiled model, both shapes already built; the model itself where this machine cannot compile it."""
    forward = torch.compile(model, dynamic=False)
    try:
        for length in (SHORT, LONG):
            rows = torch.zeros(max(1, args.batch_tokens // length), length, dtype=torch.int16, device=device)
            step_loss(forward, rows + LOSS_BIT + 1).backward()
            log(f"compiled for rows of {length}")
    except Exception as error:  # whatever the compiler raises: the eager model gives the same weights, later
        log(f"no torch.compile, training eagerly: {type(error).__name__}: {str(error)[:500]}")
        forward = model
    model.zero_grad(set_to_none=True)
    return forward


def train(model, feed, args, device, deadline):
    """Trains until `deadline` (of time.monotonic). Returns the steps made."""
    optimizer = make_optimizer(model, args, device)
    generator = torch.Generator(device).manual_seed(args.seed)
    forward = compiled(model, args, device) if args.compile else model
    began, logged, tokens, losses = time.monotonic(), time.monotonic(), 0, []
    for step in itertools.count():
        now = time.monotonic()
        if now >= deadline:
            return step
        if step % 10 == 0:
            feed.take(4)  # four shards are a million tokens, more than ten steps read
        length = LONG if step % LONG_EVERY == LONG_EVERY - 1 and feed.rows[LONG].seen else SHORT
        rows = feed.rows[length].draw(max(1, args.batch_tokens // length), generator)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, step, (now - began) / (deadline - began))
        loss = step_loss(forward, rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens += rows.numel()
        losses.append(loss.detach())
        if step % args.log_every == 0:
            mean, now = torch.stack(losses).mean().item(), time.monotonic()
            rate, tokens, losses = tokens / (now - logged), 0, []
            logged = now
            seen = "+".join(str(rows.seen) for rows in feed.rows.values())
            log(f"step {step:6d}  loss {mean:.4f}  {rate / 1e3:.0f}k tok/s  rows {seen}  left {deadline - now:.0f} s")


# ---------------------------------------------------------------- the folder


def weights_of(model):
    return {f"model.{name}": weight.detach().cpu().contiguous() for name, weight in model.named_parameters()}


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_folder(model, shape, tokenizer_json, out):
    """The Hugging Face folder, weights in bf16. Raises when the weights pass MAX_BYTES."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_str(tokenizer_json)
    ends = [tokenizer.token_to_id(token) for token in (tiny_data.IM_END, tiny_data.EOT)]
    ids = {"bos_token_id": tokenizer.token_to_id(tiny_data.BOS), "eos_token_id": ends, "pad_token_id": ends[1]}
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "dtype": "bfloat16"}
    fixed = {"rope_theta": 10000.0, "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False}
    write_json(out / "config.json", kind | asdict(shape) | fixed | ids)
    write_json(out / "generation_config.json", {"do_sample": False} | ids)
    names = {"bos_token": tiny_data.BOS, "eos_token": tiny_data.IM_END, "pad_token": tiny_data.EOT}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": LONG, "clean_up_tokenization_spaces": False}
    write_json(out / "tokenizer_config.json", kind | names | {"chat_template": tiny_data.CHAT_TEMPLATE})
    (out / "tokenizer.json").write_text(tokenizer_json)
    path = out / "model.safetensors"
    save_file({name: weight.bfloat16() for name, weight in weights_of(model).items()}, path, metadata={"format": "pt"})
    path.chmod(0o644)
    assert path.stat().st_size < MAX_BYTES, f"{path} has {path.stat().st_size} bytes"


def evaluate(out, args):
    """{dtype: {task: exact}} of the folder as it was written, computed in fp32 and in bf16."""
    from accuracy import Transformers, score, table

    scores = {}
    for dtype in ("float32", "bfloat16"):
        scores[dtype] = score(Transformers(str(out), args.device, dtype), args.items, show=3 if dtype == "bfloat16" else 0)
        log(f"weights in bf16, computed in {dtype}\n{table(scores[dtype], 0.95)}")
    return scores


STARTED = time.monotonic()


def log(text):
    print(f"[{time.monotonic() - STARTED:6.1f}] {text}", flush=True)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "enginecore" / "bundled")
    parser.add_argument("--minutes", type=float, default=7.5, help="wall clock until training ends; scoring comes after")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=300, help="steps")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 3))
    parser.add_argument("--start-rows", type=int, default=20_000, help="rows to have before training starts")
    parser.add_argument("--tokenizer-documents", type=int, default=20_000)
    parser.add_argument("--items", type=int, default=200, help="questions of each task when scoring")
    parser.add_argument("--log-every", type=int, default=200, help="steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--checkpoint", type=Path, help="also write fp32 weights to this file")
    parser.add_argument("--resume", type=Path, help="start from such a file; the tokenizer follows from --seed alone")
    parser.add_argument("--tiny", action="store_true", help="small batches, one data process, eager: for a CPU")
    args = parser.parse_args()
    if args.tiny:
        args.batch_tokens, args.workers, args.start_rows, args.compile = 4096, 1, 500, False
        args.log_every, args.warmup, args.items, args.tokenizer_documents = 10, 20, min(args.items, 20), 4000
    return args


def main():
    args = arguments()
    deadline = time.monotonic() + 60 * args.minutes
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device, shape = torch.device(args.device), Shape()
    tokenizer_json = build_tokenizer(args.seed, shape.vocab_size, args.tokenizer_documents)
    tokenizer = Tokenizer.from_str(tokenizer_json)
    check_tokenizer(tokenizer, args.seed)
    feed = Feed(tokenizer_json, args, device)
    feed.allocate()
    model = Tiny(shape, tokenizer.token_to_id(tiny_data.BOS))
    if args.resume:
        model.load_state_dict({name.removeprefix("model."): weight for name, weight in load_file(args.resume).items()})
    model.to(device)
    while feed.rows[SHORT].seen < args.start_rows:
        feed.take_one()
    log(f"{sum(weight.numel() for weight in model.parameters()):,} parameters, {feed.rows[SHORT].seen} rows to start with")
    steps = train(model, feed, args, device, deadline)
    feed.stop()
    write_folder(model, shape, tokenizer_json, args.out)
    if args.checkpoint:
        save_file(weights_of(model), args.checkpoint)
    log(f"{steps} steps; wrote {args.out}")
    scores = evaluate(args.out, args)
    size = (args.out / "model.safetensors").stat().st_size
    print("RESULT", json.dumps({"steps": steps, "bytes": size, "seconds": round(time.monotonic() - STARTED), "exact": scores}))


if __name__ == "__main__":
    main()
