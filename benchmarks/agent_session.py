"""Time of prompts and agents' sessions on any OpenAI-compatible server, by URL: the same requests for Quire and for vLLM.

    agent_session.py --url http://127.0.0.1:8000 --model NAME [--sessions 4] [--tokens 20000]
    agent_session.py --start "quire serve MODEL --port 8000 --load-format dummy" --model MODEL [--starts 2]

*prompts*: so many prompts of one length at once, one token out: prompt tokens/s from the first request to the last answer.
*session*: each turn adds new ids to all that was said, the server's own answers included, and gets an answer, until the session
is as long as asked for. TTFT is from the request to the first token; a turn's cached tokens are those that the server reports
(vLLM does so with --enable-prompt-tokens-details). *ready*: with --start, seconds from process start to a first token; the
last of several starts is warm.

All goes as token ids through /v1/completions, greedy, end-of-sequence ignored. Each part is warmed up with other ids and two
turns. The bias: this client is one process, and encodes a prompt of 80,000 ids before the clock starts. The last line is
`RESULT {json}`. Start the server with prefix caching and a context of 131,072, and vLLM with --no-enable-log-requests.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import workloads
from servers import Command, Server, end_by_signal, machine
from sse_client import Answer, Connections, Target

DEFAULT_URL = "http://127.0.0.1:8000"
WARM_UP_SEED = 50_000


class Client:
    """The requests to one server."""

    def __init__(self, url: str, args: argparse.Namespace) -> None:
        self._target = Target.of(url, "/v1/completions", args.api_key)
        self._connections = Connections(self._target)
        self._model, self._timeout_s = args.model, args.timeout

    def request(self, prompt: list[int], max_tokens: int) -> bytes:
        streamed = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        body |= streamed
        return self._target.request(json.dumps(body, separators=(",", ":")).encode())

    async def ask(self, request: bytes) -> Answer:
        """Ends the run if the request fails."""
        answer = await self._connections.ask(request, self._timeout_s)
        if answer.error:
            sys.exit(f"a request failed: {answer.error}")
        return answer


async def prompts_at_once(client: Client, args: argparse.Namespace, seed: int) -> float:
    """Prompt tokens/s of args.prompts prompts."""
    ids = workloads.prompts([args.prompt_len] * args.prompts, args.vocab_size, seed)
    answers = await asyncio.gather(*(client.ask(request) for request in [client.request(p, 1) for p in ids]))
    seconds = max(a.end for a in answers) - min(a.sent for a in answers)
    return args.prompts * args.prompt_len / seconds


async def session(client: Client, args: argparse.Namespace, number: int, tokens: int) -> list[dict[str, Any]]:
    """The turns of one session, each of which is printed as it ends."""
    said: list[int] = []
    turns: list[dict[str, Any]] = []
    while len(said) + args.new + args.answer <= tokens:
        said += workloads.prompts([args.new], args.vocab_size, 1000 * number + len(turns))[0]
        answer = await client.ask(client.request(said, args.answer))
        if len(answer.token_ids) != args.answer:
            sys.exit(f"{len(answer.token_ids)} token ids came for {args.answer}: does the server know return_token_ids?")
        turn = {
            "prompt_tokens": len(said),
            "cached_tokens": answer.cached_tokens,
            "ttft_ms": round(1e3 * (answer.first - answer.sent), 2),
            "tpot_ms": round(1e3 * (answer.end - answer.first) / max(args.answer - 1, 1), 3),
        }
        turns.append(turn)
        said += answer.token_ids
        print(f"session {number}, turn {len(turns):3}: " + ", ".join(f"{k} {v}" for k, v in turn.items()), flush=True)
    return turns


def summary(turns: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Figures of the turns behind each session's first, which nothing was said before."""
    later = [turn for turn in turns if turn["prompt_tokens"] > args.new]
    found: dict[str, Any] = {"turns": len(turns), "tokens": max(t["prompt_tokens"] for t in turns) + args.answer}
    for name in ("ttft_ms", "tpot_ms") if later else ():
        found[f"{name}_median"] = round(statistics.median(turn[name] for turn in later), 3)
        found[f"{name}_max"] = max(turn[name] for turn in later)
    if later and all(turn["cached_tokens"] is not None for turn in later):
        cached, prompts = (sum(turn[name] for turn in later) for name in ("cached_tokens", "prompt_tokens"))
        found["cached_of_prompts"] = round(cached / prompts, 4)
        found["cached_of_said_before"] = round(cached / (prompts - args.new * len(later)), 4)
    return found


async def measure(url: str, args: argparse.Namespace) -> dict[str, Any]:
    client, found = Client(url, args), {}
    if args.prompts:
        for number in range(2):
            await prompts_at_once(client, args, WARM_UP_SEED + number)
        rates = []
        for repeat in range(args.repeat):
            rates.append(round(await prompts_at_once(client, args, args.seed + repeat), 1))
            print(f"{args.prompts} prompts of {args.prompt_len} at once: {rates[-1]:,.0f} tokens/s", flush=True)
        found["prompts"] = {"count": args.prompts, "length": args.prompt_len, "tok_s": max(rates), "all_tok_s": rates}
    if args.sessions:
        print("warm-up", flush=True)
        await session(client, args, WARM_UP_SEED, 2 * (args.new + args.answer))
        numbers = range(args.seed + 1, args.seed + 1 + args.sessions)
        runs = await asyncio.gather(*(session(client, args, number, args.tokens) for number in numbers))
        found["session"] = {"sessions": args.sessions, **summary([turn for run in runs for turn in run], args)}
        print(json.dumps(found["session"]), flush=True)
    return found


def started(args: argparse.Namespace) -> dict[str, Any]:
    """Start the server args.starts times, and measure the last one."""
    log, ready, found = Path(tempfile.mkdtemp(prefix="agent-session-")) / "log", [], {}
    command = Command.of_text(args.start, args.url, args.model)
    for number in range(args.starts):
        with Server(command, log) as server:
            ready.append(server.wait_until_ready(args.start_timeout, args.api_key))
            print(f"ready: /health after {ready[-1]['health_s']} s, a token after {ready[-1]['first_token_s']} s", flush=True)
            if number == args.starts - 1:
                found = asyncio.run(measure(command.url, args))
    return {"ready": ready, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help=f"default: {DEFAULT_URL}; with --start, its --port on this machine")
    parser.add_argument("--model", required=True, help="the name it is served under")
    parser.add_argument("--name", default="server", help="what to call the server in the results")
    parser.add_argument("--api-key")
    parser.add_argument("--timeout", type=float, default=600.0, help="of one request, s")
    parser.add_argument("--start", metavar="COMMAND", help="start the server with this command, and stop it at the end")
    parser.add_argument("--starts", type=int, default=1, help="how often; the last is measured (default: %(default)s)")
    parser.add_argument("--start-timeout", type=float, default=600.0)
    parser.add_argument("--prompts", type=int, default=32, help="how many at once; 0 for none (default: %(default)s)")
    parser.add_argument("--prompt-len", type=int, default=3000)
    parser.add_argument("--repeat", type=int, default=3, help="of the prompts; the best counts (default: %(default)s)")
    parser.add_argument("--sessions", type=int, default=1, help="side by side; 0 for none (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=80_000, help="of a session (default: %(default)s)")
    parser.add_argument("--new", type=int, default=2000, help="tokens that a turn adds (default: %(default)s)")
    parser.add_argument("--answer", type=int, default=300, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=30_000, help="prompts' ids are below this (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    end_by_signal()
    found = started(args) if args.start else asyncio.run(measure(args.url or DEFAULT_URL, args))
    print("RESULT " + json.dumps({"server": args.name, "model": args.model, "machine": machine(), **found}), flush=True)


if __name__ == "__main__":
    main()
