"""`quire.sampling_params`: vLLM's path to the parameters of requests, for scripts that import from it.

    from quire.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

Our own code does not import from here, but from the files that define the names.
"""

from quire.frontend.client.beam_search import BeamSearchParams
from quire.ipc.sampling import RequestOutputKind, SamplingParams
from quire.ipc.structured_outputs_params import StructuredOutputsParams

GuidedDecodingParams = StructuredOutputsParams  # the older name

__all__ = ["BeamSearchParams", "GuidedDecodingParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
