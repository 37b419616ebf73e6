"""The runner's outputs of a model that pools: those of a decoder, whose prompts come in chunks, or of an encoder."""

from quire.workers.models.encoder import Encoder
from quire.workers.models.language_model import LanguageModel
from quire.workers.outputs.encoder_vectors import EncoderVectors
from quire.workers.outputs.output import Output
from quire.workers.outputs.vectors import vectors_of
from quire.workers.pooling.choice import PoolingChoice


def pooling_outputs(choice: PoolingChoice, model: LanguageModel, max_rows: int) -> list[Output]:
    """None for a model that only generates. Raises ModelConfigError or WeightsError for a pooler's files."""
    if choice.encoder is not None:
        assert isinstance(model, Encoder)
        return [EncoderVectors(choice.encoder, model)]
    return [*vectors_of(choice, model, max_rows)]
