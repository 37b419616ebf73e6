"""How much of long prompts the prefix cache finds for a model with recurrent layers, beside a model that has attention alone.

test_recurrent_hits.py says where exactly short prompts are found.
"""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
from serving import SMALL, Served
from tiny_models import tiny_model, tokenizer

pytestmark = pytest.mark.slow

CONTEXT = 131_072
HYBRIDS = ("qwen3.5", "nemotron-h")
OPTIONS = ("--hf-overrides", f'{{"max_position_embeddings": {CONTEXT}}}', "--cpu-kv-cache-gib", "0.5", "--max-num-seqs", "4")
PLACE = 64  # tokens: states are kept at multiples of it


@contextlib.contextmanager
def serve(name: str) -> Iterator[Served]:
    with Served(str(tiny_model(name)), *SMALL, *OPTIONS) as served:
        yield served.ready()


@pytest.fixture(scope="module", params=HYBRIDS)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serve(request.param) as served:
        yield served


def text(num_tokens: int, seed: int) -> str:
    """Text of about so many tokens."""
    drawn, words = random.Random(seed), ""
    while (missing := num_tokens - len(tokenizer().encode(words).ids)) > 0:
        words += "".join(f"{drawn.randrange(1000)} " for _ in range(missing // 4 + 1))
    return words


def message(role: str, num_tokens: int, seed: int) -> dict[str, str]:
    return {"role": role, "content": text(num_tokens, seed)}


def chat(served: Served, messages: list[dict[str, str]], max_tokens: int = 8) -> tuple[int, int, str]:
    """(prompt tokens, cached ones, the answer)."""
    body: dict[str, Any] = {"messages": messages, "max_tokens": max_tokens, "temperature": 0}
    answer = served.ask("POST", "/v1/chat/completions", body).json()
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], cached, answer["choices"][0]["message"]["content"] or ""


def test_a_long_prompt_asked_twice_is_found_but_for_its_last_block(served):
    prompt = [message("user", 20_000, 1)]
    (length, first, _), (_, second, _) = chat(served, prompt), chat(served, prompt)
    print(f"{length} tokens, found {first}, then {second}")
    assert length >= 20_000
    assert (first, second) == (0, (length - 1) // PLACE * PLACE)


def of_users(served: Served) -> list[int]:
    """Cached tokens of 16 users' prompts, one after the other, which have 10,000 tokens in common."""
    system = message("system", 10_000, 2)
    return [chat(served, [system, message("user", 300, 100 + user)])[1] for user in range(16)]


def test_a_long_system_prompt_is_found_by_every_user_from_the_second_on(served):
    with serve("qwen3-tied") as attention:
        most = of_users(attention)
    found = of_users(served)
    print(f"found {found}; a model that has attention alone {most}")
    assert min(most[1:]) > 9_900
    assert all(mine >= 0.9 * theirs for mine, theirs in zip(found[1:], most[1:], strict=True))


def test_a_long_conversation_is_found_but_for_its_new_turns(served):
    drawn, messages, total, hits, new = random.Random(3), [message("system", 200, 3)], 0, 0, 0
    before = 0
    for turn in range(40):
        messages.append(message("user", drawn.randrange(1000, 3000), 200 + turn))
        length, cached, answer = chat(served, messages)
        messages.append({"role": "assistant", "content": answer})
        total, hits, new, before = total + length, hits + cached, new + length - before, length
    print(f"of {total} tokens {hits / total:.1%} found; {1 - new / total:.1%} had been sent before")
    assert hits >= 0.94 * total
