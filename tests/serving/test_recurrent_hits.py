"""Hits of the prefix cache for a model with recurrent layers, read from `cached_tokens` as clients see it."""

from collections.abc import Iterator

import pytest
from serving import SMALL, Served
from tiny_models import CHAT_TEMPLATE, tiny_model

from quire.frontend.client.llm import LLM
from quire.frontend.text.chat_template import ChatTemplate
from quire.frontend.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

CONTEXT = 2048
OPTIONS = ("--hf-overrides", f'{{"max_position_embeddings": {CONTEXT}}}', "--max-num-seqs", "4", "--block-size", "16")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(str(tiny_model("qwen3.5")), *SMALL, *OPTIONS) as served:
        yield served.ready()


def tokenizer() -> Tokenizer:
    folder = tiny_model("qwen3.5")
    return Tokenizer.from_files({name: (folder / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")})


def system_of(num_tokens: int, seed: int) -> dict[str, str]:
    """A system message that is rendered as so many tokens."""
    template = ChatTemplate(CHAT_TEMPLATE, tokenizer().special_tokens)
    for count in range(1, num_tokens + 1):
        message = {"role": "system", "content": f"{seed}" + " the" * count}
        if len(tokenizer().encode(template.render([message], add_generation_prompt=False), False)) == num_tokens:
            return message
    raise AssertionError("no content has so many tokens")


def question(i: int) -> dict[str, str]:
    return {"role": "user", "content": f"{i * 7} " * 30}


def test_a_system_prompt_is_found_at_the_second_request(served):
    system = system_of(480, 1)
    cached = []
    for i in range(3):
        body = {"messages": [system, question(i)], "max_tokens": 2, "temperature": 0}
        answer = served.ask("POST", "/v1/chat/completions", body).json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 448, 448]


def test_messages_mark_it_too(served):
    system = system_of(480, 2)["content"]
    cached = []
    for i in range(2):
        body = {"system": system, "messages": [question(i)], "max_tokens": 2}
        answer = served.ask("POST", "/v1/messages", body).json()
        cached.append(answer["usage"].get("cache_read_input_tokens", 0))
    assert cached == [0, 448]


def test_token_ids_without_marks_are_found_at_the_third(served):
    def cached(i: int) -> int:
        ids = [4 + (j * j) % 300 for j in range(480)] + [5 + (i * 11 + j) % 300 for j in range(90)]
        return served.complete(ids, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(i) for i in range(4)] == [0, 0, 448, 448]


def test_a_prompt_asked_twice_is_found_to_the_last_place_before_its_end(served):
    ids = [6 + (j * j * 3) % 300 for j in range(640)]
    found = [served.complete(ids, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
    assert found == [0, 576]


def test_conversations_in_python_mark_their_prompts():
    options = {"hf_overrides": {"max_position_embeddings": CONTEXT}, "max_num_seqs": 4, "cpu_kv_cache_gib": 0.05}
    system = system_of(480, 3)
    with LLM(str(tiny_model("qwen3.5")), device="cpu", dtype="float32", block_size=16, **options) as llm:
        cached = [llm.chat([system, question(i)], use_tqdm=False)[0].num_cached_tokens for i in range(2)]
    assert cached == [0, 448]
