"""What a grammar may cost: the one table of bounds of its compilation and of its masks. See structured_outputs.py for its text.

llguidance has limits of its own, and they do not bound everything: on two slow cores a chain of 6,000 references in a schema
ended the process by its stack, 60,000 optional characters in a regex asked for 11 GB, 8,000 optional properties took 3.5 s, and
an ambiguous rule of ten characters 0.6 s a mask after a hundred tokens. So a grammar is tried in a process of its own first.
"""

import llguidance

COMPILE_TIMEOUT_S = 5.0  # of one grammar
TRIAL_BYTES = 256 << 20  # that trying one may take
TRIAL_TOKENS = 16  # that are tried after it was compiled
NUM_COMPILERS = 2  # threads, each with its own process that tries
MAX_CACHED = 256  # grammars, compiled ones and those that failed
MAX_CACHED_BYTES = 512 << 20  # that they are guessed to take
MAX_MASK_S = 0.25  # of the processor's time for one token, when it is tried
MAX_WAIT_S = 1.0  # for one token, when it is used: on a busy machine, so a request that takes longer ends for a reason

PARSER_LIMITS = llguidance.LLParserLimits(
    max_lexer_states=100_000,  # 1 to 2 kB each
    verbose_errors=False,  # they would quote what the model has written
)
