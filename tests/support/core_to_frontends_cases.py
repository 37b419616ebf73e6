"""Messages that tests of CoreToFrontends send and expect."""

import msgspec
import numpy as np
from ipc_cores import LoopingCore, RawFrontend

from quire.ipc.messages.frontend import AddRequest, CoreMessage, Generate, StepOutputs, TokenInputs
from quire.ipc.sampling import SamplingParams

EPOCH = 77
decode = msgspec.msgpack.Decoder(CoreMessage).decode


def answer(core: LoopingCore, frontend: RawFrontend) -> CoreMessage:
    """The next message to the frontend."""
    core.until(frontend.ready)
    return decode(frontend.socket.recv())


def add(request_id: int, epoch: int = EPOCH, **params) -> AddRequest:
    return AddRequest(
        epoch, request_id, TokenInputs(np.arange(4, dtype=np.int32).tobytes()), Generate(SamplingParams(**params))
    )


def outputs(*tokens: int, key: int = 0, **more) -> StepOutputs:
    return StepOutputs(EPOCH, 0, np.full(len(tokens), key, np.int64).tobytes(), np.asarray(tokens, np.int32).tobytes(), **more)
