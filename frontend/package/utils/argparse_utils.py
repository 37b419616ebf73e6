"""`quire.utils.argparse_utils`: vLLM's path to the parser of its examples, for scripts that import from it.

Our own code does not import from here, but from the files that define the names.
"""

from quire.frontend.cli.flexible_parser import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
