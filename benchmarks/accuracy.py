"""How many held-out questions a model answers exactly, task by task: the proof that a server computes what it should.

Against any OpenAI-compatible server:    python benchmarks/accuracy.py --url http://127.0.0.1:8000 --concurrency 16
Against transformers, with no server:    python benchmarks/accuracy.py --engine transformers --model enginecore/loading/bundled

Every question is greedy (temperature 0) through /v1/chat/completions. An answer counts when it equals the expected text,
function calls when their number, order, names and arguments do. The questions come from tiny_data.py, seeded; none of them is
in the tiny model's training text. Relatives may be there: 34 + 12 where 12 + 34 is asked, another phrasing of the same fact, a
call with the same arguments by another name. Prints a table and a last line `RESULT {json}`; exits 1 when a task is under
--at-least.
"""

import argparse
import http.client
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from tiny_data import SCORED, benchmark_items

MAX_TOKENS = 160
BETWEEN = "</tool_call>\n<tool_call>"


def messages_of(item):
    return [*item.history, {"role": "user", "content": item.question}]


def called(reply):
    """The function calls in a reply, each as {"name", "arguments"}: parsed by the server, or else written in the text."""
    try:
        if reply.get("tool_calls"):
            functions = [call["function"] for call in reply["tool_calls"]]
            return [{"name": function["name"], "arguments": json.loads(function["arguments"])} for function in functions]
        text = (reply.get("content") or "").strip()
        return [json.loads(call) for call in text.removeprefix("<tool_call>").removesuffix("</tool_call>").split(BETWEEN)]
    except (ValueError, KeyError, TypeError):
        return []


def is_right(item, reply):
    if item.calls:
        return called(reply) == list(item.calls)
    return not reply.get("tool_calls") and (reply.get("content") or "").strip() == item.answer


class Server:
    """A client of one server: blocking connections, one for each request, as many at once as `concurrency`."""

    def __init__(self, url, api_key, model, concurrency, timeout_s=120):
        parts = urlsplit(url if "//" in url else f"http://{url}")
        self.connection = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self.host, self.base = parts.netloc, parts.path.rstrip("/").removesuffix("/v1")
        self.headers = {"Content-Type": "application/json"}
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"
        self.concurrency, self.timeout_s = concurrency, timeout_s
        self.model = model or self.request("GET", "/v1/models")["data"][0]["id"]

    def request(self, method, path, body=None):
        connection = self.connection(self.host, timeout=self.timeout_s)
        try:
            connection.request(method, self.base + path, body and json.dumps(body), self.headers)
            response = connection.getresponse()
            text = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"{method} {path}: {response.status} {text[:300]!r}")
        return json.loads(text)

    def reply(self, item):
        body = {"model": self.model, "messages": messages_of(item), "temperature": 0, "max_tokens": MAX_TOKENS}
        if item.tools:
            body["tools"] = list(item.tools)
        return self.request("POST", "/v1/chat/completions", body)["choices"][0]["message"]

    def replies(self, items):
        with ThreadPoolExecutor(self.concurrency) as pool:
            return list(pool.map(self.reply, items))


class Transformers:
    """Batched greedy decoding with the reference implementation."""

    def __init__(self, directory, device="cpu", dtype="float32", batch=256):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.torch, self.batch, self.model = torch, batch, directory
        self.tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
        self.network = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).to(device)

    def replies(self, items):
        return [
            reply for start in range(0, len(items), self.batch) for reply in self.generate(items[start : start + self.batch])
        ]

    def generate(self, items):
        prompts = [
            self.tokenizer.apply_chat_template(
                messages_of(item), tools=list(item.tools) or None, add_generation_prompt=True, tokenize=False
            )
            for item in items
        ]
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(self.network.device)
        with self.torch.inference_mode():
            ids = self.network.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
                pad_token_id=self.tokenizer.pad_token_id,
            )
        new = ids[:, inputs["input_ids"].shape[1] :]
        return [{"content": text} for text in self.tokenizer.batch_decode(new, skip_special_tokens=True)]


def score(engine, size, tasks=SCORED, seed=0, show=0):
    """{task: share of exact answers}; prints up to `show` wrong answers of each task."""
    shares = {}
    for task in tasks:
        items = benchmark_items(task, size, seed)
        replies = engine.replies(items)
        wrong = [(item, reply) for item, reply in zip(items, replies, strict=True) if not is_right(item, reply)]
        shares[task] = round(1 - len(wrong) / len(items), 4)
        for item, reply in wrong[:show]:
            print(f"  {task}: {item.question!r}\n    expected {item.answer!r}\n    got      {reply!r}")
    return shares


def table(shares, at_least):
    rows = [
        f"{task:<10} {share:>8.1%}{'' if share >= at_least else '  under ' + format(at_least, '.0%')}"
        for task, share in shares.items()
    ]
    return "\n".join(["task          exact", *rows])


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engine", choices=("server", "transformers"), default="server")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--model", default="", help="served name, or the folder for --engine transformers")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--device", default="cpu", help="for --engine transformers")
    parser.add_argument("--dtype", default="float32", help="for --engine transformers")
    parser.add_argument("--items", type=int, default=200, help="questions of each task")
    parser.add_argument("--tasks", default=",".join(SCORED))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-least", type=float, default=0.95)
    parser.add_argument("--show", type=int, default=0, help="print this many wrong answers of each task")
    parser.add_argument("--json", action="store_true", help="print the RESULT line alone")
    return parser.parse_args()


def main():
    args = arguments()
    if args.engine == "transformers":
        engine = Transformers(args.model, args.device, args.dtype)
    else:
        engine = Server(args.url, args.api_key, args.model, args.concurrency)
    started = time.perf_counter()
    shares = score(engine, args.items, args.tasks.split(","), args.seed, 0 if args.json else args.show)
    seconds = time.perf_counter() - started
    passed = min(shares.values()) >= args.at_least
    if not args.json:
        print(table(shares, args.at_least))
    result = {"engine": args.engine, "model": engine.model, "items": args.items, "seed": args.seed, "tasks": shares}
    print("RESULT", json.dumps(result | {"at_least": args.at_least, "passed": passed, "seconds": round(seconds, 1)}))
    sys.exit(not passed)


if __name__ == "__main__":
    main()
