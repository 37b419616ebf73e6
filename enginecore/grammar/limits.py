"""Limits on what a grammar may cost to compile and to make masks from. Limits on its text are in ipc/structured_outputs.py.

llguidance has limits of its own, and they do not bound everything. On two slow cores a chain of 6,000 references in a schema
overflowed the stack of the process, 60,000 optional characters in a regex asked for 11 GB, 8,000 optional properties took
3.5 s, and an ambiguous rule of ten characters took 0.6 s a mask after a hundred tokens. So a grammar is first tried in a
process of its own (trial.py).
"""

import llguidance

COMPILE_TIMEOUT_S = 5.0  # CPU time of the trial, for one grammar
TRIAL_BYTES = 256 << 20  # memory for the trial of one
TRIAL_TOKENS = 16  # tokens that are tried after it was compiled
NUM_COMPILERS = 4  # threads: one API key has three at most, and two for large grammars; each takes a trial process
MAX_CACHED = 256  # grammars: texts of those that compile, and errors of the others
MAX_COMPILED = 32  # of them: a small one takes 0.15 MiB, and 1 to 3 ms to compile again
MAX_CACHED_BYTES = 512 << 20  # memory of all of them
MAX_MASK_S = 0.25  # CPU time for one token in the trial
MAX_WAIT_S = 1.0  # for one token in use: more than in the trial, as the machine may be busy; beyond it the request ends

PARSER_LIMITS = llguidance.LLParserLimits(
    max_lexer_states=100_000,  # 1 to 2 kB each
    verbose_errors=False,  # verbose ones would quote what the model has written
)
