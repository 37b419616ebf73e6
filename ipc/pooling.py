"""PoolingParams: the options of a request for vectors or scores; PoolingInfo: what a served model can be asked for in that way.

Names and meaning are vLLM's. A Python user or a route makes PoolingParams, a frontend sends them, and the core reads them and
tells the workers in one word of a prefill row (`PoolRow`). Bounds that depend on the model are checked by `check_pooling`, in
the frontend and again in the core.
"""

from typing import Any, Literal, NamedTuple

import msgspec

from quire.ipc.messages.message import Message
from quire.ipc.struct_errors import StructErrors

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify", "embed_sparse"]
PoolingType = Literal["CLS", "LAST", "MEAN", "MAX", "WEIGHTED_MEAN", "SQRT_MEAN"]
TASKS: tuple[PoolingTask, ...] = ("embed", "classify", "token_embed", "token_classify", "embed_sparse")
OF_TOKENS = ("token_embed", "token_classify")  # tasks with a result for each token of the prompt
VECTOR = -1  # in the place of a result's number of rows: it is a vector
MAX_DIMENSIONS = (1 << 16) - 1
MAX_INPUTS = 128  # of one request: as many as a request has children

_OTHER_TASKS = {"encode": "token_embed or token_classify", "score": "classify or embed", "reward": "classify or token_classify"}


class PoolingParams(msgspec.Struct, kw_only=True, array_like=True, forbid_unknown_fields=True, metaclass=StructErrors):
    """How to pool one prompt.

    task: embed (a vector), classify (a score for each label), token_embed, token_classify (the same for each token), or
    embed_sparse (weights of tokens of the vocabulary); None: what the model can do, or what the method that is called means.
    tasks: several of them in its place, which one computation of the prompt serves. dimensions: keep so many elements of a
    vector, which is normalized afterwards; None: all. use_activation: whether a vector is normalized, and scores pass the
    model's activation; None: as the model says. truncate_prompt_tokens: use only so many tokens of the prompt, the first ones;
    -1: as many as fit the context; clients cut, not the engine. skip_reading_prefix_cache: compute the whole prompt, even if a
    part is cached.

    Raises ValueError, naming the field.
    """

    task: PoolingTask | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    skip_reading_prefix_cache: bool = False
    tasks: list[PoolingTask] | None = None

    def __post_init__(self) -> None:
        for task in (self.task, *(self.tasks or ())):
            if task is not None and task not in TASKS:
                instead = _OTHER_TASKS.get(str(task))
                more = f"; write {instead}" if instead else ""
                raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r:.40}{more}")
        if self.tasks is not None and (self.task is not None or not self.tasks or len(set(self.tasks)) < len(self.tasks)):
            raise ValueError("tasks must list different tasks, in the place of task")
        if self.dimensions is not None and not (type(self.dimensions) is int and 1 <= self.dimensions <= MAX_DIMENSIONS):
            raise ValueError(f"dimensions must be between 1 and {MAX_DIMENSIONS}, got {self.dimensions!r:.40}")
        keep = self.truncate_prompt_tokens
        if keep is not None and not (type(keep) is int and (keep == -1 or keep >= 1)):
            raise ValueError(f"truncate_prompt_tokens must be at least 1, or -1 for what fits, got {keep!r:.40}")

    def clone(self) -> "PoolingParams":
        return msgspec.structs.replace(self)


class ScoreTemplate(Message, frozen=True):
    """How a query and a document become one prompt: part 0, instruction, part 1, query, part 2, document, part 3."""

    instruction: str  # of requests without one
    parts: list[str]

    def prompt(self, query: str, document: str, instruction: str | None = None) -> str:
        begin, before_query, before_document, end = self.parts
        return f"{begin}{instruction or self.instruction}{before_query}{query}{before_document}{document}{end}"


class LateInteraction(Message, frozen=True):
    """How a model of token vectors (ColBERT) reads texts: a marker's id behind the first special token, -1: none. A query has
    query_length tokens: it is cut there, and filled with mask_id if it `expands`; other tokens see those that fill it if
    attends_to_expansion. A document has document_length tokens at most, 0: as the context has; its tokens that are among
    `skipped` have no vector."""

    query_marker: int
    document_marker: int
    query_length: int
    document_length: int
    mask_id: int
    expands: bool
    attends_to_expansion: bool
    skipped: list[int] = []  # noqa: RUF012


class PoolingInfo(Message, frozen=True):
    """How a model pools. embedding_size: elements of a vector; 0: it makes none. token_size: the same of a token's vector;
    0: as many. labels: of a classifier's scores, in order; empty: it has none. is_matryoshka: `dimensions` may cut vectors, to
    one of matryoshka_dimensions if there are some.

    prompts: texts that are put before a text, by name. score_template: how a query and a document become one prompt. is_whole:
    a prompt is computed in one step, as its tokens see both ways. takes_types: a second text has another token type. late: of a
    model that compares texts by their tokens' vectors. step_tag_id: scores of tokens are those of this one alone; -1: of all.
    max_embed_len: tokens of a text that gets the mean of its parts' vectors;
    0: none is. skips_prompts: what is put before a text does not count in its vector. do_lower_case: texts are written so.
    truncate_dim: `dimensions` of vectors of texts without it; 0: all.
    """

    tasks: list[PoolingTask]
    pooling_type: PoolingType
    generates: bool = False  # the model does so, too
    embedding_size: int = 0
    labels: list[str] = []  # noqa: RUF012  # msgspec copies a default list for each struct
    use_activation: bool = True
    is_matryoshka: bool = False
    matryoshka_dimensions: list[int] = []  # noqa: RUF012
    similarity_fn_name: str = "cosine"
    prompts: dict[str, str] = {}  # noqa: RUF012
    default_prompt_name: str | None = None
    score_template: ScoreTemplate | None = None
    is_whole: bool = False
    takes_types: bool = False
    token_size: int = 0
    late: LateInteraction | None = None
    step_tag_id: int = -1
    max_embed_len: int = 0
    skips_prompts: bool = False
    do_lower_case: bool = False
    truncate_dim: int = 0

    @property
    def may_hit(self) -> bool:
        """Whether a prefix in the cache may stand for its tokens' hidden states: only the last one's are pooled."""
        return self.pooling_type == "LAST" and not self.is_whole


class PoolRow(NamedTuple):
    """How a prefill row is pooled: one word of the plan. more: further tasks; the results then are one row of numbers, those of
    `task` first and the others' in the order of TASKS. is_scored: the vectors of tokens are compared with those of a query, and
    the result is that number."""

    task: PoolingTask
    dimensions: int  # 0: all
    use_activation: bool
    more: tuple[PoolingTask, ...] = ()
    is_scored: bool = False

    @property
    def is_of_tokens(self) -> bool:
        return self.task in OF_TOKENS and not self.more and not self.is_scored

    @property
    def parts(self) -> "list[PoolRow]":
        """A row for each task."""
        return [self._replace(task=task, more=()) for task in (self.task, *self.more)]

    def word(self) -> int:
        more = sum(1 << TASKS.index(task) for task in self.more)
        return self.dimensions | TASKS.index(self.task) << 16 | self.use_activation << 20 | more << 21 | self.is_scored << 30

    @classmethod
    def of_word(cls, word: int) -> "PoolRow":
        more = tuple(task for i, task in enumerate(TASKS) if word >> 21 + i & 1)
        return cls(TASKS[word >> 16 & 15], word & MAX_DIMENSIONS, bool(word >> 20 & 1), more, bool(word >> 30 & 1))


def check_pooling(params: PoolingParams, info: PoolingInfo | None, tasks: list[str]) -> PoolRow:
    """The request as a row, with the model's defaults. tasks: all of the model's. Raises ValueError, naming the field."""
    if info is None:
        raise ValueError(f"task: this model does not make vectors or scores; it can {' and '.join(tasks) or 'generate'}")
    wanted = sorted(params.tasks, key=TASKS.index) if params.tasks else [params.task or info.tasks[0]]
    for task in wanted:
        if task not in info.tasks:
            raise ValueError(f"task: this model cannot {task}; it can {', '.join(tasks)}")
    if len(wanted) > 1 and not info.is_whole:
        raise ValueError("tasks: several results of one prompt are those of an encoder, and this model is none")
    size = info.embedding_size or info.token_size
    if params.dimensions is not None:
        if not {"embed", "token_embed"}.intersection(wanted):
            raise ValueError(f"dimensions: only vectors are cut, and the task is {wanted[0]}")
        if not info.is_matryoshka:
            raise ValueError(f"dimensions: this model's vectors keep their {size} elements: it was not trained to be cut")
        if allowed := info.matryoshka_dimensions:
            if params.dimensions not in allowed:
                raise ValueError(f"dimensions must be one of {', '.join(map(str, allowed))}, got {params.dimensions}")
        elif params.dimensions > size:
            raise ValueError(f"dimensions must be at most {size}, got {params.dimensions}")
    use = info.use_activation if params.use_activation is None else params.use_activation
    of_texts = wanted[0] == "embed" and "token_embed" not in wanted
    cut = info.truncate_dim if of_texts and info.truncate_dim < size else 0
    return PoolRow(wanted[0], params.dimensions or cut, use, tuple(wanted[1:]))


def as_params(value: Any) -> PoolingParams:
    """Raises ValueError for anything but PoolingParams."""
    if not isinstance(value, PoolingParams):
        raise ValueError(f"pooling_params must be PoolingParams(...), got {type(value).__name__}")
    return value
