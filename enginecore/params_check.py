"""ParamsCheck: lets the classes of the operator's own logits processors refuse requests (vLLM's validate_params).

The classes live in the workers, so the workers are asked, by a control record between two steps; only that request waits. It is
a Preparer (preparation.py), used only if a class has something to check.
"""

from concurrent.futures import Future

import msgspec

from quire.enginecore.preparation import PreparationFailed
from quire.enginecore.scheduling.sequence import Sequence
from quire.enginecore.workers import WorkerGroup
from quire.ipc.messages.frontend import AddRequest
from quire.ipc.messages.workers import MAX_CONTROL_BYTES, CheckParams, ControlReply
from quire.ipc.sampling import SamplingParams

_LONG = ("allowed_token_ids", "logit_bias", "bad_words", "bad_words_token_ids", "stop", "structured_outputs")


class ParamsCheck:
    def __init__(self, workers: WorkerGroup) -> None:
        self._workers = workers

    def __call__(self, request: AddRequest, sequences: list[Sequence]) -> Future[None] | None:
        if not sequences[0].is_processed:
            return None
        if not self._workers.is_ready:
            raise PreparationFailed("the engine's workers are starting: try again later", "overloaded")
        checked: Future[None] = Future()
        params = _that_fits(request.task.params)
        self._workers.send_control(lambda number: CheckParams(number, params), lambda reply: _take(checked, reply))
        return checked


def _take(checked: Future[None], reply: ControlReply) -> None:
    """Take the first rank's answer: every rank says the same."""
    if checked.done():
        return
    if reply.error:
        checked.set_exception(PreparationFailed("the engine's worker failed while the request was checked", "engine_error"))
    elif reply.payload:
        checked.set_exception(PreparationFailed(reply.payload.decode()))
    else:
        checked.set_result(None)


def _that_fits(params: SamplingParams) -> SamplingParams:
    """The parameters, without their long lists if these would not fit a control record."""
    if len(msgspec.msgpack.encode(params)) < MAX_CONTROL_BYTES // 2:
        return params
    return msgspec.structs.replace(params, **dict.fromkeys(_LONG))
