"""`quire.utils.argparse_utils`: vLLM's path to the parser of its examples, for scripts whose imports name it.

Nothing of ours imports from here: each name comes from the file that defines it.
"""

from quire.frontend.cli.flexible_parser import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
