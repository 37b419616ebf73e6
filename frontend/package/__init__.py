"""The package `quire` itself: the names that a user's script imports from it.

    from quire import LLM, AsyncClient, SamplingParams, StructuredOutputsParams

A name is imported on first use (PEP 562), so `import quire` costs nothing, neither for our processes nor for --help, and none
of these names imports torch. pyproject.toml installs this folder as `quire`; the folders below it hold vLLM's import paths. A
link to this file at the repository's root is for scripts beside a clone named `quire`, which Python would otherwise take for a
namespace package without names.
"""

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.frontend.client.async_client import AsyncClient
    from quire.frontend.client.async_llm import AsyncLLM, AsyncLLMEngine
    from quire.frontend.client.beam_search import BeamSearchParams
    from quire.frontend.client.engine_args import AsyncEngineArgs, EngineArgs
    from quire.frontend.client.llm import LLM
    from quire.frontend.client.llm_engine import LLMEngine
    from quire.frontend.client.outputs import CompletionOutput, RequestOutput
    from quire.frontend.client.pooling_outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from quire.frontend.client.prompt import PromptType, TextPrompt, TokensPrompt
    from quire.ipc.pooling import PoolingParams
    from quire.ipc.sampling import RequestOutputKind, SamplingParams
    from quire.ipc.structured_outputs_params import StructuredOutputsParams
    from quire.ipc.version import VERSION as __version__

__all__ = [
    "LLM",
    "AsyncClient",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LLMEngine",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

# In a wheel the folders lie beside this file. In a checkout they lie two levels up, where an editable installation does not
# look by itself: its finder knows folders without `__init__.py` only below a `quire` that has none either. Seen through the
# link at the root, this file has the folders beside it and its own neighbors in frontend/package. pytest reads that link as a
# module of no package if the checkout's folder has a name with a dash.
_HERE = os.path.dirname(__file__)
_PATH: list[str] = globals().get("__path__", [])
if not os.path.isdir(os.path.join(_HERE, "ipc")):
    _PATH.append(os.path.dirname(os.path.dirname(_HERE)))
elif os.path.isdir(os.path.join(_HERE, "frontend", "package")):
    _PATH.append(os.path.join(_HERE, "frontend", "package"))


class _VllmModules:
    """A finder behind all others, for vLLM's modules (vllm_modules.py), which are read when one is first imported."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> object:
        if not name.startswith("quire.") or name.startswith(_OWN):
            return None
        from quire.frontend.client.vllm_modules import VllmModules

        return VllmModules().find_spec(name)


_OWN = ("quire.frontend", "quire.ipc", "quire.enginecore", "quire.workers", "quire.kernels")
if not any(getattr(finder, "__name__", "") == _VllmModules.__name__ for finder in sys.meta_path):
    sys.meta_path.append(_VllmModules)  # type: ignore[arg-type]


def __getattr__(name: str) -> object:
    module: object
    match name:
        case "LLM":
            from quire.frontend.client import llm as module
        case "AsyncClient":
            from quire.frontend.client import async_client as module
        case "AsyncLLM" | "AsyncLLMEngine":
            from quire.frontend.client import async_llm as module
        case "BeamSearchParams":
            from quire.frontend.client import beam_search as module
        case "AsyncEngineArgs" | "EngineArgs":
            from quire.frontend.client import engine_args as module
        case "LLMEngine":
            from quire.frontend.client import llm_engine as module
        case (
            "ClassificationRequestOutput"
            | "EmbeddingRequestOutput"
            | "PoolingOutput"
            | "PoolingRequestOutput"
            | "ScoringRequestOutput"
        ):
            from quire.frontend.client import pooling_outputs as module
        case "CompletionOutput" | "RequestOutput":
            from quire.frontend.client import outputs as module
        case "PromptType" | "TextPrompt" | "TokensPrompt":
            from quire.frontend.client import prompt as module
        case "PoolingParams":
            from quire.ipc import pooling as module
        case "RequestOutputKind" | "SamplingParams":
            from quire.ipc import sampling as module
        case "StructuredOutputsParams":
            from quire.ipc import structured_outputs_params as module
        case "__version__":
            from quire.ipc.version import VERSION

            return VERSION
        case "__version_tuple__":
            from quire.ipc.version import VERSION_TUPLE

            return VERSION_TUPLE
        case _ if name.startswith("_"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        case _:
            from quire.frontend.client.vllm_modules import names_of

            return names_of("quire")(name)
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
