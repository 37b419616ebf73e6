"""`quire.engine.arg_utils`: vLLM's path to an engine's options, for scripts whose imports name it.

Nothing of ours imports from here: each name comes from the file that defines it.
"""

from quire.frontend.client.engine_args import AsyncEngineArgs, EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
