"""`quire.outputs`: vLLM's path to what requests return, for scripts whose imports name it.

Nothing of ours imports from here: each name comes from the file that defines it.
"""

from quire.frontend.client.outputs import CompletionOutput, RequestOutput

__all__ = ["CompletionOutput", "RequestOutput"]
