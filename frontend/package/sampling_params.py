"""`quire.sampling_params`: vLLM's path to the parameters of requests, for scripts whose imports name it.

    from quire.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

Nothing of ours imports from here: each name comes from the file that defines it.
"""

from quire.frontend.client.beam_search import BeamSearchParams
from quire.ipc.sampling import RequestOutputKind, SamplingParams
from quire.ipc.structured_outputs_params import StructuredOutputsParams

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
