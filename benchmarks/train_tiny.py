"""Trains the tiny model that ships inside Quire: a Llama of under 4M parameters and its tokenizer, in minutes on one GPU.

    python benchmarks/train_tiny.py --minutes 8 --tokenizer enginecore/loading/bundled/tokenizer.json      # a GPU, 16 cores
    python benchmarks/train_tiny.py --tiny --minutes 1 --out /tmp/tiny          # the same path on a CPU, to see it run

One command does everything: a tokenizer and background processes that write and pack documents while the GPU trains
(tiny_rows.py); the model (tiny_llama.py); a folder in Hugging Face format (bf16); exact-match scores by accuracy.py, in fp32
and in bf16. Documents are packed into rows and attend only within themselves, at positions that begin at 0, as when they are
served. --minutes is the time from the start to the end of training; the learning rate depends on the time. Data and initial
weights are seeded; the number of steps depends on the machine. --checkpoint writes fp32 weights, --resume starts from them.
--tokenizer keeps the token ids of an earlier run, which users may have stored; without it the text makes a new tokenizer.

    python benchmarks/train_tiny.py --tiny --draft draft_model --minutes 12       # or eagle3: its drafters, on a CPU

--draft distils a drafter from the trained model instead, for `--spec-method` (tiny_drafts.py); tests/test_bundled_drafts.py
measures how many tokens a step has with it. Those that are shipped took 7 (eagle3) and 8 and 5 minutes (`--resume`) on a CPU.
"""

import argparse
import itertools
import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import tiny_data
import torch
from safetensors.torch import load_file, save_file
from tiny_drafts import DRAFT, TAPS, Draft, Head, HeadConfig, Target, common_ids, head_config, head_tensors
from tiny_llama import Tiny, TinyConfig
from tiny_rows import LONG, LOSS_BIT, SHORT, Feed, build_tokenizer, check_tokenizer
from tokenizers import Tokenizer

LONG_EVERY = 6  # one in so many steps takes rows of the second length; a drafter's rows are all short
MAX_BYTES = 8_000_000
MAX_DRAFT_BYTES = {"draft_model": 1_000_000, "eagle3": 2_000_000}
ROOT = Path(__file__).resolve().parent.parent
BUNDLED, DRAFTS = ROOT / "enginecore" / "loading" / "bundled", ROOT / "enginecore" / "loading" / "bundled_drafts"


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
    """The compiled model, built for both shapes; the model itself if this machine cannot compile it."""
    forward = torch.compile(model, dynamic=False)
    try:
        for length in (SHORT, LONG):
            rows = torch.zeros(max(1, args.batch_tokens // length), length, dtype=torch.int16, device=device)
            step_loss(forward, rows + LOSS_BIT + 1).backward()
            log(f"compiled for rows of {length}")
    except Exception as error:  # any error of the compiler: the eager model gives the same weights, later
        log(f"no torch.compile, training eagerly: {type(error).__name__}: {str(error)[:500]}")
        forward = model
    model.zero_grad(set_to_none=True)
    return forward


def train(model, feed, args, device, deadline):
    """Train until `deadline` (of time.monotonic). Returns the number of steps."""
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
        length = LONG if step % args.long_every == args.long_every - 1 and feed.rows[LONG].seen else SHORT
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
    """Write the Hugging Face folder, with weights in bf16. Raises if the weights exceed MAX_BYTES."""
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
    """{dtype: {task: exact}} of the written folder, computed in fp32 and in bf16."""
    from accuracy import Transformers, score, table

    scores = {}
    for dtype in ("float32", "bfloat16"):
        scores[dtype] = score(Transformers(str(out), args.device, dtype), args.items, show=3 if dtype == "bfloat16" else 0)
        log(f"weights in bf16, computed in {dtype}\n{table(scores[dtype], 0.95)}")
    return scores


# ---------------------------------------------------------------- drafters


def train_draft(args, deadline):
    """Distil the drafter args.draft from the bundled model, and write its folder."""
    tokenizer_json, device = (BUNDLED / "tokenizer.json").read_text(), torch.device("cpu")
    bos = Tokenizer.from_str(tokenizer_json).token_to_id(tiny_data.BOS)
    feed = Feed(tokenizer_json, args, device)
    feed.allocate()
    model = Tiny(TinyConfig(), bos)
    model.load_state_dict({n.removeprefix("model."): w.float() for n, w in load_file(BUNDLED / "model.safetensors").items()})
    while feed.rows[SHORT].seen < args.start_rows:
        feed.take_one()
    is_head = args.draft == "eagle3"
    target = Target(model, TAPS if is_head else ())
    chosen = common_ids(feed.rows[SHORT].data[: feed.rows[SHORT].seen], HeadConfig.draft_vocab_size)
    found = load_file(args.resume) if args.resume else {}
    if "d2t" in found:
        chosen = found.pop("d2t") + torch.arange(len(chosen))
    drafter = Head(target, chosen) if is_head else Draft(target)
    drafter.load_state_dict({n.removeprefix("model."): w.float() for n, w in found.items()} or drafter.state_dict())
    log(f"{sum(weight.numel() for weight in drafter.parameters()):,} parameters")
    steps, out = train(drafter, feed, args, device, deadline), args.out or DRAFTS / args.draft
    feed.stop()
    if is_head:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "config.json", head_config(drafter, json.loads((BUNDLED / "config.json").read_text())))
        save_file(head_tensors(drafter), out / "model.safetensors", metadata={"format": "pt"})
        (out / "model.safetensors").chmod(0o644)
    else:
        write_folder(drafter, DRAFT, tokenizer_json, out)
    size = (out / "model.safetensors").stat().st_size
    assert size <= MAX_DRAFT_BYTES[args.draft], f"{out} has {size} bytes"
    log(f"{steps} steps; wrote {out}, {size:,} bytes")
    print("RESULT", json.dumps({"steps": steps, "bytes": size, "seconds": round(time.monotonic() - STARTED)}))


STARTED = time.monotonic()


def log(text):
    print(f"[{time.monotonic() - STARTED:6.1f}] {text}", flush=True)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="folder to write; by default the one that is shipped")
    parser.add_argument("--draft", choices=tuple(MAX_DRAFT_BYTES), help="distil this drafter from the trained model")
    parser.add_argument("--minutes", type=float, default=8, help="wall clock until training ends; scoring comes after")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=300, help="steps")
    parser.add_argument("--long-every", type=int, default=LONG_EVERY, help="steps from one with long rows to the next")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 3))
    parser.add_argument("--start-rows", type=int, default=20_000, help="rows to have before training starts")
    parser.add_argument("--tokenizer", type=Path, help="keep this tokenizer.json instead of training one")
    parser.add_argument("--tokenizer-documents", type=int, default=20_000)
    parser.add_argument("--items", type=int, default=200, help="questions of each task when scoring")
    parser.add_argument("--log-every", type=int, default=200, help="steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--checkpoint", type=Path, help="also write fp32 weights to this file")
    parser.add_argument(
        "--resume", type=Path, help="start from such a file; give its --tokenizer too; a drafter, from its weights"
    )
    parser.add_argument("--embed", action="store_true", help="train the bundled embedder instead (train_embedder.py), on a CPU")
    parser.add_argument("--tiny", action="store_true", help="small batches, one data process, eager: for a CPU")
    args = parser.parse_args()
    if args.tiny:
        args.batch_tokens, args.workers, args.start_rows, args.compile = 4096, 1, 500, False
        args.log_every, args.warmup, args.items, args.tokenizer_documents = 10, 20, min(args.items, 20), 4000
    return args


def main():
    args = arguments()
    if args.embed:
        import train_embedder  # needs transformers

        return train_embedder.main(args, log)
    args.out = args.out or ROOT / "enginecore" / "loading" / "bundled"
    deadline = time.monotonic() + 60 * args.minutes
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    if args.draft:
        args.long_every = 1 << 30
        return train_draft(args, deadline)
    device, shape, args.out = torch.device(args.device), TinyConfig(), args.out or BUNDLED
    if args.tokenizer:
        tokenizer_json = args.tokenizer.read_text()
    else:
        tokenizer_json = build_tokenizer(args.seed, shape.vocab_size, args.tokenizer_documents)
    tokenizer = Tokenizer.from_str(tokenizer_json)
    log(check_tokenizer(tokenizer, args.seed))
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
