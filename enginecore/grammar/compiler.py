"""GrammarCompiler: the preparer that compiles grammars for structured output, while only the request itself waits.

A grammar in the cache costs a copy of its matcher. Another one is first tried in a process that it may crash (trial.py), then
compiled here, by one of a few threads, in turn among API keys. One that is bad, or takes too long, makes its request a 400; the
error is cached, too, so that sending it again costs nothing. The cache keeps only the text of grammars that were not used
lately: they are compiled again, without a trial, so that clients that never send a schema twice do not fill memory. Copies of a
matcher share a lexer and so cannot make masks at the same time: a grammar that many sequences use at once is compiled several
times, at most once for each thread of llguidance that makes masks (mask_threads.py). A grammar that sequences use one after the
other keeps its lexer, which caches its states: near the end of a bounded string a mask takes a new lexer several times as long
(benchmarks/LOG.md).

Owned by the daemon, called by the core's loop through preparation.py.
"""

import hashlib
import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import llguidance

from quire.enginecore.grammar.language.tag_formats import FIELDS
from quire.enginecore.grammar.language.texts import in_words
from quire.enginecore.grammar.limits import MAX_CACHED, MAX_CACHED_BYTES, MAX_COMPILED, NUM_COMPILERS, PARSER_LIMITS
from quire.enginecore.grammar.mask_threads import MAX_THREADS, MaskThreads
from quire.enginecore.grammar.matchers import MAX_BEFORE_REASONING, Constraint, Reasoning, stop_bits
from quire.enginecore.grammar.trial import Trial, Verdict
from quire.enginecore.grammar.vocabulary import Vocabulary, VocabularyError, make_vocabulary
from quire.enginecore.preparation import PreparationFailed
from quire.enginecore.scheduling.sequence import Sequence
from quire.ipc.messages.frontend import AddRequest
from quire.ipc.process.fair_executor import FairExecutor
from quire.ipc.sampling import SamplingParams
from quire.ipc.step.sections import INT32_MAX
from quire.ipc.structured_outputs import StructuredOutputs

log = logging.getLogger("quire.enginecore")

QUICK_S = 0.05  # total time for compiling a grammar several times, for the n sequences of a request
STACK_BYTES = 16 << 20  # for threads that compile: twice what was enough in the trial process


class Compiled(NamedTuple):
    """A grammar compiled once. users: constraints that use its lexer, held by weak references."""

    lexer: int
    matcher: llguidance.LLMatcher  # only copied, never advanced
    users: weakref.WeakSet[Constraint]


@dataclass
class Grammar:
    """A grammar, compiled unless it was not used lately, or the error that it has. num_bytes: what it takes, once compiled."""

    error: str = ""
    lark: str = ""
    num_bytes: int = 0
    number: int = 0
    compiled: list[Compiled] = field(default_factory=list)

    @property
    def held_bytes(self) -> int:
        return self.num_bytes if self.compiled else len(self.lark)

    @property
    def least_used(self) -> Compiled:
        return min(self.compiled, key=lambda compiled: len(compiled.users))


class GrammarCompiler:
    """num_mask_threads: a grammar is compiled at most once for each of these."""

    def __init__(
        self, tokenizer_json: bytes | None, vocab_size: int, eos_token_ids: tuple[int, ...], num_mask_threads: int
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self._num_threads = num_mask_threads
        self.mask_threads = MaskThreads(num_mask_threads, self.vocabulary)
        self._tokenizer_json = tokenizer_json
        self._vocabulary: Future[Vocabulary] | None = None
        self._executor = _executor_with_stack(NUM_COMPILERS)
        self._turns = FairExecutor(self._executor, NUM_COMPILERS)
        self._trials: list[Trial] = []
        self._free_trials: list[Trial] = []  # the last one used comes first: as many have a process as were used at once
        self._cache: OrderedDict[bytes, Grammar] = OrderedDict()  # least recently used first
        self._compiled: OrderedDict[bytes, Grammar] = OrderedDict()  # those of the cache that are compiled, in the same order
        self._lock = threading.Lock()  # protects the caches, the trials, and the next two
        self._cached_bytes = 0
        self._num_grammars = 0

    def start(self) -> None:
        """Begin to make the vocabulary. Other threads run no Python meanwhile, so call it before requests can come."""
        if self._vocabulary is None:
            self._vocabulary = self._executor.submit(self._make_vocabulary)

    def _make_vocabulary(self) -> Vocabulary:
        if self._tokenizer_json is None:
            raise VocabularyError("structured output is not available: this model has no tokenizer.json")
        return make_vocabulary(self._tokenizer_json, self.vocab_size, self.eos_token_ids)

    # ------------------------------------------------------------------------------------------------- a request
    def prepare(self, request: AddRequest, sequences: list[Sequence]) -> Future[None] | None:
        """See preparation.Preparer. Raises PreparationFailed for a grammar that is known to be bad."""
        params = sequences[0].task.sampling
        wanted = params.grammar
        if wanted is None and params.thinking_token_budget is None:
            return None
        if wanted is None:
            for seq in sequences:
                self._constrain(seq, None, None)
            return None
        digest = _digest(wanted)
        grammar = self._find(digest)
        if grammar is None:
            self.start()
            return self._in_turn(request, wanted, lambda: self._compile_for(wanted, digest, sequences))
        is_shared = self._use(wanted, grammar, sequences)
        if is_shared and len(grammar.compiled) < self._num_threads:
            self._in_turn(request, wanted, lambda: self._compile_once_more(grammar))
        return None

    def _in_turn(self, request: AddRequest, wanted: StructuredOutputs, work: Callable[[], None]) -> Future[None]:
        """Do the work when it is the turn of the request's tenant."""
        tenant = request.tenant
        return self._turns.submit(work, tenant.name if tenant is not None else "", len(wanted.text))

    def _compile_for(self, wanted: StructuredOutputs, digest: bytes, sequences: list[Sequence]) -> None:
        grammar = self._find(digest)  # another request may have compiled it meanwhile
        if grammar is None:
            grammar = self._remember(digest, self._compile(wanted, self._verdict(wanted, digest), len(sequences)))
        self._use(wanted, grammar, sequences)

    def _use(self, wanted: StructuredOutputs, grammar: Grammar, sequences: list[Sequence]) -> bool:
        """Give the sequences matchers; returns whether one of them has to share its lexer. Raises PreparationFailed."""
        if grammar.error:
            is_named = wanted.field == "tools" and grammar.error.startswith(FIELDS)  # it names one of several tools
            raise PreparationFailed(grammar.error if is_named else f"{wanted.name}: {grammar.error}")
        is_shared = False
        for seq in sequences:
            compiled = grammar.least_used
            is_shared |= len(compiled.users) > 0
            compiled.users.add(self._constrain(seq, compiled.matcher.deep_copy(), compiled.lexer))
        return is_shared

    def _constrain(self, seq: Sequence, matcher: llguidance.LLMatcher | None, lexer: int | None) -> Constraint:
        params = seq.task.sampling
        reasoning = self._reasoning(seq, params, matcher is not None)
        vocabulary = self.vocabulary() if matcher is not None else None
        special = vocabulary.special if vocabulary is not None else frozenset()
        # a stop id that adds no text may end the output just as the model's own end ids
        ends = seq.task.stop_ids & special if params.ignore_eos else (seq.task.stop_ids & special) | self.eos_token_ids
        constraint = Constraint(
            matcher=matcher,
            lexer=lexer or 0,
            reasoning=reasoning,
            stops=stop_bits(sorted(ends)),
            last_resort=stop_bits(sorted(self.eos_token_ids)),
            eos_token_ids=self.eos_token_ids,
        )
        seq.constraint, seq.mask_from = constraint, constraint.mask_from(len(seq.prompt))
        for token in seq.known[len(seq.prompt) :].tolist():  # of a request that goes on after the loss of another engine
            if not constraint.take(token) and constraint.is_over:
                seq.mask_from = INT32_MAX
        return constraint

    def _reasoning(self, seq: Sequence, params: SamplingParams, has_grammar: bool) -> Reasoning | None:
        """None if the model does not reason, or has done so in the prompt."""
        ends, starts = params.reasoning_end_token_ids, params.reasoning_start_token_ids or []
        if not ends:
            return None
        if has_grammar and len(starts) > 1:
            return None  # no single token decides whether reasoning begins: the grammar applies from the first token
        reasoning = Reasoning(ends, params.thinking_token_budget, starts, 0 if has_grammar else MAX_BEFORE_REASONING)
        return None if reasoning.ends_in(_last_turn(seq.prompt.tolist(), self.eos_token_ids)) else reasoning

    # ---------------------------------------------------------------------------------------------------- compiling
    def vocabulary(self) -> Vocabulary:
        """The vocabulary; waits until it is made. Raises PreparationFailed."""
        assert self._vocabulary is not None
        try:
            return self._vocabulary.result()
        except VocabularyError as error:
            raise PreparationFailed(str(error)) from None

    def _verdict(self, wanted: StructuredOutputs, digest: bytes) -> Verdict:
        """The trial's verdict on a grammar: the one in the cache, or a new one. Called in a thread of the executor."""
        with self._lock:
            known = self._cache.get(digest)
        if known is not None:
            return Verdict(known.error, known.lark, known.num_bytes)
        self.vocabulary()  # without one there is no trial
        trial = self._take_trial()
        try:
            return _tried(trial, wanted)
        finally:
            with self._lock:
                self._free_trials.append(trial)

    def _compile(self, wanted: StructuredOutputs, verdict: Verdict, num_sequences: int) -> Grammar:
        """Compile a grammar that has been tried. Called in a thread of the executor."""
        if verdict.error:
            return Grammar(error=verdict.error)
        vocabulary = self.vocabulary()
        with self._lock:
            self._num_grammars += 1
            grammar = Grammar(lark=verdict.lark, num_bytes=verdict.num_bytes, number=self._num_grammars)
        begin = time.monotonic()
        while len(grammar.compiled) < min(num_sequences, self._num_threads):
            matcher = self._add_matcher(grammar, vocabulary)
            if matcher.is_error():
                return Grammar(error=in_words(wanted, matcher.get_error()))
            if time.monotonic() - begin > QUICK_S:
                break
        return grammar

    def _take_trial(self) -> Trial:
        with self._lock:
            if self._free_trials:
                return self._free_trials.pop()
            assert self._tokenizer_json is not None
            trial = Trial(self._tokenizer_json, self.vocab_size, self.eos_token_ids)
            self._trials.append(trial)
            return trial

    def _add_matcher(self, grammar: Grammar, vocabulary: Vocabulary) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(vocabulary.tokenizer, grammar.lark, log_level=0, limits=PARSER_LIMITS)
        lexer = grammar.number * MAX_THREADS + len(grammar.compiled)
        grammar.compiled.append(Compiled(lexer, matcher, weakref.WeakSet()))
        return matcher

    def _compile_once_more(self, grammar: Grammar) -> None:
        if len(grammar.compiled) < self._num_threads:
            self._add_matcher(grammar, self.vocabulary())

    # -------------------------------------------------------------------------------------------------------- cache
    def _find(self, digest: bytes) -> Grammar | None:
        """A grammar that is compiled or bad; from now on the one that was used last."""
        with self._lock:
            grammar = self._cache.get(digest)
            if grammar is None or not (grammar.error or digest in self._compiled):
                return None
            self._cache.move_to_end(digest)
            if digest in self._compiled:
                self._compiled.move_to_end(digest)
            return grammar

    def _remember(self, digest: bytes, grammar: Grammar) -> Grammar:
        with self._lock:
            self._forget(digest)
            self._cache[digest] = grammar
            self._cached_bytes += grammar.held_bytes
            if grammar.compiled:
                self._compiled[digest] = grammar
            while len(self._compiled) > MAX_COMPILED or (self._is_large and len(self._compiled) > 1):
                self._keep_text(next(iter(self._compiled)))
            while len(self._cache) > MAX_CACHED or (self._is_large and len(self._cache) > 1):
                self._forget(next(iter(self._cache)))
        return grammar

    @property
    def _is_large(self) -> bool:
        return self._cached_bytes > MAX_CACHED_BYTES

    def _keep_text(self, digest: bytes) -> None:
        """Keep no more than the text of a grammar. Sequences that use it have matchers of their own."""
        dropped = self._compiled.pop(digest)
        self._cache[digest] = kept = Grammar(lark=dropped.lark, num_bytes=dropped.num_bytes)
        self._cached_bytes += kept.held_bytes - dropped.held_bytes

    def _forget(self, digest: bytes) -> None:
        self._compiled.pop(digest, None)
        if (forgotten := self._cache.pop(digest, None)) is not None:
            self._cached_bytes -= forgotten.held_bytes

    def close(self) -> None:
        """End the processes and threads; no request may wait for a grammar any more."""
        self.mask_threads.close()
        self._executor.shutdown(wait=False, cancel_futures=True)
        for trial in self._trials:
            trial.close()


def _tried(trial: Trial, wanted: StructuredOutputs) -> Verdict:
    """The trial's verdict. Raises PreparationFailed without one: then nothing is known about the grammar."""
    try:
        return trial.run(wanted)
    except OSError as error:
        log.error("a grammar could not be tried: %s", error)
        raise PreparationFailed("the process that tries grammars was lost; try again", "overloaded") from error


def _digest(wanted: StructuredOutputs) -> bytes:
    return hashlib.blake2b(wanted.text.encode(errors="replace"), digest_size=16, person=wanted.kind.encode()[:16]).digest()


def _last_turn(prompt: list[int], eos_token_ids: frozenset[int]) -> list[int]:
    """The last turn of a prompt, as far as can be told: what follows the last token that ends a turn."""
    start = next((i + 1 for i in range(len(prompt) - 1, -1, -1) if prompt[i] in eos_token_ids), 0)
    return prompt[start:]


def _executor_with_stack(num_threads: int) -> ThreadPoolExecutor:
    """An executor with STACK_BYTES for each thread. They start here, because the size is the whole process's meanwhile."""
    before, barrier = threading.stack_size(STACK_BYTES), threading.Barrier(num_threads + 1)
    try:
        executor = ThreadPoolExecutor(num_threads, "quire-grammar")
        for _ in range(num_threads):
            executor.submit(_wait_at, barrier.wait)
        barrier.wait()
    finally:
        barrier.abort()  # a signal handler may raise in here: threads left waiting would keep the process from ending
        threading.stack_size(before)
    return executor


def _wait_at(wait: Callable[[], int]) -> None:
    wait()
