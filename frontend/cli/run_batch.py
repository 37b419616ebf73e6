"""`quire run-batch`: its flags. The work is in batch_job.py, imported when the flags are known to be valid.

The flags are vLLM's: -i, -o, --model, and the engine's.
"""

import argparse
import os
import sys

from quire.frontend.cli.parser_arguments import add_parser_arguments
from quire.frontend.cli.vllm_compat import without_vllms
from quire.ipc.process.command import CommandParser, quiet_interrupts


def add_run_batch(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    parser = commands.add_parser(
        "run-batch",
        help="answer a file of requests, one JSON object on each line",
        description="Answer a file of requests in OpenAI's batch format: a line is an object with custom_id, method, url and "
        "body. Answers are lines of the output file, in the order in which they come: match them by custom_id. After an "
        "interruption, a second call leaves out what the output file has. Exits with 0 if all requests succeeded, else with 1.",
        epilog="example: quire run-batch -i in.jsonl -o out.jsonl --model Qwen/Qwen3-0.6B",
    )
    files = parser.add_argument_group("files")
    files.add_argument(
        "-i", "--input-file", required=True, metavar="FILE", help="a file, an http(s) URL, or - for standard input"
    )
    files.add_argument("-o", "--output-file", required=True, metavar="FILE", help="a file, or - for standard output")
    files.add_argument("--model", dest="model_flag", metavar="MODEL", help="the same as MODEL without the flag")
    parser.set_defaults(run=_run_batch, parser=parser, prepare=without_vllms, notes=())
    from quire.ipc.config import add_engine_arguments

    add_parser_arguments(parser)
    add_engine_arguments(parser)


def _run_batch(args: argparse.Namespace) -> int:
    from quire.ipc.config import engine_config_from

    parser: CommandParser = args.parser
    if args.model is not None and args.model_flag is not None:
        parser.error("the model is given twice")
    if args.output_file.startswith(("http://", "https://")):
        parser.error("--output-file must be a file or -: sending it to a URL is not supported")
    if _are_the_same(args.input_file, args.output_file):
        parser.error("--input-file and --output-file are the same file")
    try:
        config = engine_config_from(
            args, model=args.model or args.model_flag, enable_log_requests=False, disable_log_stats=True
        )
    except ValueError as error:
        parser.error(str(error))
    if args.notes:
        print(f"quire run-batch: nothing is needed here for {', '.join(args.notes)}", file=sys.stderr)
    with quiet_interrupts():
        from quire.frontend.cli.answers_file import BatchFileError
        from quire.frontend.cli.batch_job import run_job
        from quire.frontend.http.api.output_plan import ParserNames
    try:
        return run_job(args.input_file, args.output_file, config, ParserNames(args.tool_call_parser, args.reasoning_parser))
    except BatchFileError as error:
        parser.error(str(error))


def _are_the_same(a: str, b: str) -> bool:
    try:
        return os.path.samefile(a, b)
    except OSError:
        return False
