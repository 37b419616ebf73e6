"""The cost of structured output: `structured.py MODEL --engine quire,vllm [--rows 64] [--output 128] [--same-schema]`.

Rows of fixed length run twice in one engine, without and with a JSON Schema per row (its own, unless --same-schema), at
temperature 1.0; the result is how much longer the latter takes. Schemas need more than the output's length, so that no row ends
early. Masks are expensive near a string's maxLength, and with random weights no string ends before it. --titles sets that
length: `alike` (60 characters in every schema: all rows reach it in the same steps, the worst case), `mixed` (20, and two more
in each further schema), `unbounded` (one string is the whole output).
Grammars are compiled before the clock starts, by a run that does not count. vLLM uses xgrammar. Each engine runs in a process
of its own. `--masks` needs no engine: it times llguidance's masks for the model's tokenizer, one at a time on one core. Goals:
at most 5 % for an 8B model, 25 % for a 0.6B one. The last line is `RESULT {json}`.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

TITLES = ("alike", "mixed", "unbounded")


def schema(number: int, titles: str = "alike") -> dict[str, Any]:
    """A list of records, as for data extraction; different numbers give different schemas."""
    bounds = {"alike": {"maxLength": 60}, "mixed": {"maxLength": 20 + 2 * number}, "unbounded": {}}
    record = {
        "type": "object",
        "properties": {
            f"id_{number}": {"type": "integer", "minimum": 0, "maximum": 10**6},
            "title": {"type": "string", **bounds[titles]},
            "kind": {"enum": ["article", "book", "letter", "report"]},
            "authors": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 4},
            "pages": {"type": ["integer", "null"]},
        },
        "required": [f"id_{number}", "title", "kind", "authors", "pages"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": record, "minItems": 64}


def schemas(args: argparse.Namespace, titles: str) -> list[str]:
    return [json.dumps(schema(0 if args.same_schema else i, titles)) for i in range(args.rows)]


def prompts(args: argparse.Namespace) -> list[dict[str, list[int]]]:
    random = np.random.default_rng(0)
    vocab = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    return [{"prompt_token_ids": random.integers(10, vocab, args.input).tolist()} for _ in range(args.rows)]


def open_quire(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    from quire import LLM, SamplingParams, StructuredOutputsParams

    options = {
        "load_format": args.load_format,
        "device": args.device,
        "enable_prefix_caching": False,
        **json.loads(args.options),
    }
    return LLM(args.model, max_model_len=args.max_model_len, **options), SamplingParams, StructuredOutputsParams


def open_vllm(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    llm = LLM(
        model=args.model,
        load_format=args.load_format,
        max_model_len=args.max_model_len,
        enable_prefix_caching=False,
        disable_log_stats=True,
        structured_outputs_config={"backend": "xgrammar"},
    )
    return llm, SamplingParams, StructuredOutputsParams


ENGINES = {"quire": open_quire, "vllm": open_vllm}


def run_engine(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """In a process of its own: measure one engine with all kinds of titles in turn."""
    llm, sampling, structured = ENGINES[name](args)
    given = prompts(args)

    def seconds(constraints: list[Any]) -> float:
        params = [
            sampling(max_tokens=args.output, ignore_eos=True, temperature=1.0, detokenize=False, structured_outputs=constraint)
            for constraint in constraints
        ]
        begin = time.perf_counter()
        outputs = llm.generate(given, params, use_tqdm=False)
        taken = time.perf_counter() - begin
        assert all(len(o.outputs[0].token_ids) == args.output for o in outputs)
        return taken

    def measured(titles: str) -> dict[str, Any]:
        wanted, nothing = [structured(json=text) for text in schemas(args, titles)], [None] * args.rows
        seconds(nothing), seconds(wanted)
        free = min(seconds(nothing) for _ in range(args.repeat))
        bound = min(seconds(wanted) for _ in range(args.repeat))
        found = {
            "engine": name,
            "titles": titles,
            "rows": args.rows,
            "output": args.output,
            "free_s": round(free, 4),
            "structured_s": round(bound, 4),
            "overhead": round(bound / free - 1, 4),
            "ms_a_step_more": round(1000 * (bound - free) / args.output, 3),
        }
        print(found, file=sys.stderr, flush=True)  # for interrupted runs
        return found

    return [measured(titles) for titles in args.titles]


def measure_masks(tokenizer_json: bytes, vocab_size: int, num_tokens: int = 400) -> dict[str, float]:
    """Microseconds per mask, and per consumed token, over a random output of the schema."""
    import llguidance
    from llguidance.numpy import fill_next_token_bitmask

    from quire.enginecore.grammar.limits import PARSER_LIMITS
    from quire.enginecore.grammar.trial import judge
    from quire.enginecore.grammar.vocabulary import make_vocabulary
    from quire.ipc.structured_outputs import StructuredOutputs

    begin = time.perf_counter()
    vocabulary = make_vocabulary(tokenizer_json, vocab_size)
    made = time.perf_counter() - begin
    verdict = judge(StructuredOutputs("json", json.dumps(schema(0))), vocabulary)
    assert not verdict.error, verdict.error
    begin = time.perf_counter()
    matcher = llguidance.LLMatcher(vocabulary.tokenizer, verdict.lark, limits=PARSER_LIMITS)
    compiled = time.perf_counter() - begin
    mask, random, masks, consumed = np.zeros((1, vocabulary.num_words), np.int32), np.random.default_rng(0), [], []
    for _ in range(num_tokens):
        begin = time.perf_counter()
        fill_next_token_bitmask(matcher, mask)
        masks.append(time.perf_counter() - begin)
        ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        begin = time.perf_counter()
        matcher.consume_token(int(random.choice(ids)))
        consumed.append(time.perf_counter() - begin)
    us = np.asarray(masks) * 1e6
    return {
        "vocabulary_s": round(made, 3),
        "compile_ms": round(1000 * compiled, 2),
        "mask_us_mean": round(float(us.mean()), 1),
        "mask_us_p50": round(float(np.median(us)), 1),
        "mask_us_p99": round(float(np.quantile(us, 0.99)), 1),
        "consume_us_mean": round(float(np.mean(consumed)) * 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("--engine", default="quire", help="quire, vllm, or both with a comma")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--input", type=int, default=32)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--same-schema", action="store_true")
    parser.add_argument("--titles", nargs="+", choices=TITLES, default=["alike"])
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--options", default="{}", help="more options of quire's engine, as JSON")
    parser.add_argument("--masks", action="store_true")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.masks:
        config = json.loads((Path(args.model) / "config.json").read_text())
        data = (Path(args.model) / "tokenizer.json").read_bytes()
        print("RESULT " + json.dumps(measure_masks(data, config["vocab_size"])))
    elif args.child:
        print("RESULT " + json.dumps(run_engine(args.child, args)))
    else:
        results = [result for name in args.engine.split(",") for result in in_a_process(name)]
        for r in results:
            free, bound = f"{r['free_s']:8.3f} s", f"{r['structured_s']:8.3f} s with schemas"
            print(f"{r['engine']:8} titles {r['titles']:10} {free}  {bound}  {100 * r['overhead']:+.1f} %")
        print("RESULT " + json.dumps(results))


def in_a_process(name: str) -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, *sys.argv, "--child", name], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.rpartition("RESULT ")[2])


if __name__ == "__main__":
    main()
