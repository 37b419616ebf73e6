"""The cost and the gain of speculation: `speculation.py MODEL --configs off '{"method": "ngram"}' … [--batch 1 16 64]`.

For each configuration an engine of its own generates --tokens tokens for batches of prompts of --prompt-len tokens; without a
configuration, or with "off", nothing is drafted. Random weights serve (--load-format dummy): their drafts are never right, so
that tokens are steps, and the ratio to the first configuration is the price of a step; with `"rejection_sample_method":
"synthetic"` and `synthetic_acceptance_rates` drafts are accepted as often as these say. --repeating: prompts repeat one token,
and so do the answers, since no other is allowed: an n-gram drafter is always right. A line for each configuration and batch
gives tokens a second, the mean length of what a step accepted, milliseconds a step of one row, the tokens a second of the
answers' second half alone (in which the engine has learnt how many drafts pay), and ratios to the first configuration, as soon
as it is known; the last line is `RESULT {json}`.

The same for vLLM, which has these keys of --speculative-config: `vllm.LLM(model, load_format="dummy", max_model_len=…,
enable_prefix_caching=False, speculative_config={"method": "eagle3", "model": HEAD, "num_speculative_tokens": 3,
"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.8, 0.6, 0.45]})`, and `generate` with
`SamplingParams(temperature=1.0, max_tokens=…, ignore_eos=True, detokenize=False)` and the same prompts. A rate is in both
engines the probability that a draft and all before it are accepted.
"""

import argparse
import gc
import json
import random
import time
from typing import Any

from quire import LLM, SamplingParams

REPEATED = 37  # a token id


def prompts(batch: int, args: argparse.Namespace, vocab: int) -> list[dict[str, list[int]]]:
    rng, made = random.Random(args.seed + batch), []
    for _ in range(batch):
        ids = [REPEATED if args.repeating else rng.randrange(vocab) for _ in range(args.prompt_len)]
        made.append({"prompt_token_ids": ids})
    return made


def counters(llm: LLM) -> dict[str, float]:
    time.sleep(0.6)  # the engine's figures are at most half a second old
    return {metric.name: getattr(metric, "value", 0.0) for metric in llm.get_metrics() if "spec_decode" in metric.name}


def measure(llm: LLM, batch: int, args: argparse.Namespace, vocab: int) -> dict[str, float]:
    """Tokens a second, and tokens a step of a row, of the fastest of --repeat runs."""
    allowed = [REPEATED] if args.repeating else None
    params, half, few = (
        SamplingParams(temperature=1.0, max_tokens=most, ignore_eos=True, detokenize=False, allowed_token_ids=allowed)
        for most in (args.tokens, args.tokens // 2, 1)
    )
    asked = prompts(batch, args, vocab)
    llm.generate(asked, params, use_tqdm=False)
    firsts, halves = ([_seconds(llm, asked, some) for _ in range(args.repeat)] for some in (few, half))
    before = counters(llm)
    times = [_seconds(llm, asked, params) for _ in range(args.repeat)]
    after = counters(llm)
    accepted = sum(after.get(name, 0) - before.get(name, 0) for name in after if name.endswith("num_accepted_tokens"))
    total = args.repeat * batch * (args.tokens - 1)
    length = total / max(total - accepted, 1)
    tokens_s = batch * (args.tokens - 1) / (min(times) - min(firsts))  # without the prompts
    second_half = batch * (args.tokens - args.tokens // 2) / max(min(times) - min(halves), 1e-9)
    print("seconds of each run:", *(f"{took:.3f}" for took in times), flush=True)
    of_steps = {"length": round(length, 3), "step_ms": round(1000 * batch * length / tokens_s, 3)}
    return {"tokens_s": round(tokens_s, 1), "second_half_s": round(second_half, 1), **of_steps}


def _seconds(llm: LLM, asked: list[dict[str, list[int]]], params: SamplingParams) -> float:
    begin = time.perf_counter()
    llm.generate(asked, params, use_tqdm=False)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model folder")
    parser.add_argument("--configs", nargs="+", default=["off", '{"method": "ngram"}'], metavar="JSON")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=256, help="of each answer (default: %(default)s)")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--repeating", action="store_true")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--options", default="{}", help="JSON, further options of LLM")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    first: dict[int, dict[str, float]] = {}
    for config in args.configs:
        speculation = {} if config == "off" else {"speculative_config": json.loads(config)}
        options = {
            "max_model_len": args.prompt_len + args.tokens + 16,
            "enable_prefix_caching": False,
            **json.loads(args.options),
        }
        llm = LLM(args.model, load_format=args.load_format, dtype=args.dtype, **speculation, **options)
        vocab = llm.get_tokenizer().vocab_size
        for batch in args.batch:
            found = measure(llm, batch, args, vocab)
            base = first.setdefault(batch, found)
            ratios = {f"{key}_ratio": round(found[key] / base[key], 3) for key in ("tokens_s", "second_half_s", "step_ms")}
            results.append({"config": config, "batch": batch, **found, **ratios})
            print(json.dumps(results[-1]), flush=True)
        llm.shutdown()
        del llm
        gc.collect()
    print("RESULT", json.dumps({"model": args.model, "results": results}))


if __name__ == "__main__":
    main()
