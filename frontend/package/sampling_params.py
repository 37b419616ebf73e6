"""`quire.sampling_params`: vLLM's path to the parameters of requests, for scripts that import from it.

    from quire.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

Our own code does not import from here, but from the files that define the names.
"""

from quire.frontend.client.beam_search import BeamSearchParams
from quire.frontend.client.guided_decoding import GuidedDecodingParams
from quire.ipc.sampling import RequestOutputKind, SamplingParams, SamplingType
from quire.ipc.structured_outputs_params import StructuredOutputsParams

__all__ = [
    "BeamSearchParams",
    "GuidedDecodingParams",
    "RequestOutputKind",
    "SamplingParams",
    "SamplingType",
    "StructuredOutputsParams",
]
