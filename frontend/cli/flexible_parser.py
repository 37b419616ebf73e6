"""FlexibleArgumentParser: the parser of vLLM's examples, for scripts with an engine's flags and their own.

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    llm = LLM(**vars(parser.parse_args()))

Flags may be spelled with - or _, and vLLM's flags without effect here are removed, as in `quire serve`. Imported by
`quire.utils.argparse_utils`.
"""

import logging
import sys
from typing import Any

from quire.frontend.cli.vllm_compat import UnsupportedFlag, take_out
from quire.ipc.process.command import CommandParser
from quire.ipc.process.flags import json_flags, normal_words

log = logging.getLogger("quire")


class FlexibleArgumentParser(CommandParser):
    """argparse.ArgumentParser with these changes. Flags may not be abbreviated."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        if self._subparsers is None:  # with subparsers, each of them does this for its own flags
            try:
                words, notes = take_out(normal_words(words, json_flags(self)), self.actions())
            except UnsupportedFlag as error:
                self.error(str(error))
            for note in notes:
                log.info("not needed here, and without effect: %s", note)
        return super().parse_known_args(words, namespace)
