"""`quire complete`: completes texts by any OpenAI-compatible server: one after another in a terminal, or just one."""

import argparse
import io
import sys
from typing import Any, TextIO

from quire.frontend.cli.api_address import ChatError
from quire.frontend.cli.api_client import ChatServer, server_of
from quire.frontend.cli.chat import typed_lines


def body_of(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """The fields common to all requests."""
    sampling = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    return {"model": model, **{name: value for name, value in sampling.items() if value is not None}}


def complete(args: argparse.Namespace, stdin: TextIO | None = None, out: TextIO | None = None) -> int:
    """Returns the exit code. Piped input is one prompt."""
    stdin, out = stdin or sys.stdin, out or sys.stdout
    if isinstance(stdin, io.TextIOWrapper):
        stdin.reconfigure(errors="replace")
    try:
        server = server_of(args)
        body = body_of(args, args.model or server.first_model())
        if args.quick is not None:
            _show(server, {**body, "prompt": args.quick}, out)
        elif not stdin.isatty():
            prompt = stdin.read()
            if not prompt:
                raise ChatError("nothing was piped in")
            _show(server, {**body, "prompt": prompt}, out)
        else:
            _prompt_by_prompt(server, body, out)
    except (ChatError, OSError) as error:
        print(f"quire complete: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _show(server: ChatServer, body: dict[str, Any], out: TextIO) -> None:
    for piece in server.complete(body):
        out.write(piece)
        out.flush()
    out.write("\n")
    out.flush()


def _prompt_by_prompt(server: ChatServer, body: dict[str, Any], out: TextIO) -> None:
    print(f"{body['model']} goes on with what you type. Ctrl-C stops it, Ctrl-D leaves.", file=out)
    for prompt in filter(None, typed_lines(out)):
        try:
            _show(server, {**body, "prompt": prompt}, out)
        except KeyboardInterrupt:
            print(" [stopped]", file=out)
        except ChatError as error:  # go on to the next prompt
            print(f"quire complete: {error}", file=sys.stderr)
