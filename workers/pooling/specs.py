"""What an encoder's config.json says of the head behind its layers: `HeadSpec`. heads.py makes the modules."""

from typing import Literal

import msgspec

from quire.kernels.elementwise.activation_cpu import Activation
from quire.workers.layers.norm import NormSpec

HeadKind = Literal["sequence", "token", "masked_lm"]
HeadPooling = Literal["cls", "mean", "late"]


class HeadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A head: a dense layer of the hidden size with its activation, a norm and a product, of which the first two may lack.

    sequence: a score for each label of a text; token: of each of its tokens; masked_lm: a logit for each of the vocabulary.
    """

    kind: HeadKind
    num_outputs: int  # labels; of masked_lm the vocabulary
    pooling: HeadPooling = "cls"  # sequence: the head's input; late: the mean of the outputs of all tokens
    dense: Activation | None = None  # the activation behind the dense layer; None: there is no dense layer
    dense_bias: bool = True
    norm: NormSpec | None = None
    out_bias: bool = True
