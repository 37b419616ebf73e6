"""Measures what clients see of single faults: `faults.py MODEL [--frontends 3] [--faults frontend-term worker-stop ...]`.

It starts a server, and for each fault opens --streams streams. When they have some tokens, the fault is made; from then on
a new request is sent each 0.1 s, --probes of them. Faults: a frontend gets SIGTERM, SIGKILL or SIGSTOP; the engine's core
or a worker gets SIGKILL or SIGSTOP; the process that tries grammars gets SIGKILL, and the new requests bring a schema each.

Results: streams that ended with an error (lost), the longest time without a token of those that went on (gap_s), new
requests that were served, and the longest time that one took (wait_s). Prints a line for each fault and a last line `RESULT
{json}`.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from heal import core_of
from lost_rank import workers
from servers import Server, engine_command, machine, tree
from sse_client import Answer, Connections, Target, clock

FRONTEND, TRIAL = b"quire.frontend.http", b"quire.enginecore.grammar.trial"
SIGNALS = {"term": signal.SIGTERM, "kill": signal.SIGKILL, "stop": signal.SIGSTOP}
FAULTS = (
    "frontend-term",
    "frontend-kill",
    "frontend-stop",
    "worker-kill",
    "worker-stop",
    "core-kill",
    "core-stop",
    "grammar-kill",
)
PROBE_EVERY_S, PATIENCE_S = 0.1, 120.0


def processes(server: Server, module: bytes) -> list[int]:
    return [pid for pid in tree(server.pid) if module in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]


def victim(server: Server, who: str) -> int:
    match who:
        case "frontend":
            return processes(server, FRONTEND)[0]
        case "worker":
            return workers(server)[0]
        case "core":
            return core_of(server)
    return processes(server, TRIAL)[0]


class Client:
    def __init__(self, server: Server, args: argparse.Namespace) -> None:
        self._target, self._args = Target.of(server.command.url, "/v1/completions"), args
        self._model, self._schemas = server.command.model, 0

    async def ask(self, max_tokens: int, schema: dict[str, Any] | None = None) -> Answer:
        """On a connection of its own, as a new client would."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": "Once upon a time",
            "max_tokens": max_tokens,
            "ignore_eos": True,
        }
        body |= {"guided_json": schema, "ignore_eos": False} if schema is not None else {}
        request = self._target.request(json.dumps({**body, "stream": True}).encode())
        return await Connections(self._target).ask(request, PATIENCE_S)

    async def probe(self, number: int, with_schema: bool) -> tuple[bool, float]:
        """Whether a new request was served, and how long its first token took."""
        await asyncio.sleep(number * PROBE_EVERY_S)
        self._schemas += 1
        schema = {"type": "object", "properties": {f"a{self._schemas}": {"type": "integer"}}} if with_schema else None
        begin = clock()
        answer = await self.ask(8, schema)
        return not answer.error, (clock() if answer.error else answer.first) - begin

    async def suffer(self, server: Server, fault: str) -> dict[str, Any]:
        who, _, how = fault.partition("-")
        if who == "grammar":
            await self.probe(0, True)  # its process starts with the first grammar
        streams = [asyncio.create_task(self.ask(self._args.output_len)) for _ in range(self._args.streams)]
        await asyncio.sleep(self._args.after)
        os.kill(victim(server, who), SIGNALS[how])
        probes = await asyncio.gather(*(self.probe(n, who == "grammar") for n in range(self._args.probes)))
        answers = await asyncio.gather(*streams)
        return {
            "fault": fault,
            "streams": len(answers),
            "lost": sum(bool(answer.error) for answer in answers),
            "gap_s": round(max((max(answer.gaps, default=0.0) for answer in answers if not answer.error), default=0.0), 2),
            "new": len(probes),
            "served": sum(served for served, _ in probes),
            "wait_s": round(max(wait for _, wait in probes), 2),
            "errors": sorted({str(answer.error)[:120] for answer in answers if answer.error})[:2],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model folder")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--frontends", type=int, default=3)
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--output-len", type=int, default=1024)
    parser.add_argument("--after", type=float, default=1.0, help="seconds of streaming before the fault")
    parser.add_argument("--probes", type=int, default=30, help="new requests")
    parser.add_argument("--pause", type=float, default=10.0, help="seconds between faults")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--options", default="", help="more flags of `quire serve`")
    args = parser.parse_args()
    options = f"--frontends {args.frontends} {args.options}"
    command = engine_command(
        "quire",
        args.model,
        port=args.port,
        load_format=args.load_format,
        max_model_len=args.max_model_len,
        memory=0.9,
        site="",
        options=options,
    )
    log, found = Path(tempfile.mkdtemp(prefix="faults-")) / "quire.log", []
    with Server(command, log) as server:
        server.wait_until_ready(600.0)
        print(f"started (log: {log})", flush=True)
        client = Client(server, args)
        asyncio.run(client.ask(64))  # kernels, caches
        for fault in args.faults:
            found.append(asyncio.run(client.suffer(server, fault)))
            print(json.dumps(found[-1]), flush=True)
            time.sleep(args.pause)
            server.wait_until_healthy(300.0)
    print(
        "RESULT "
        + json.dumps({"model": Path(args.model).name, **machine(), "date": time.strftime("%Y-%m-%d"), "faults": found})
    )


if __name__ == "__main__":
    main()
