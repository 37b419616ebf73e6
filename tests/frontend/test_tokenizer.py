"""Tokenizer: encoding, exact pieces, chat templates equal to transformers', defaults; bad input is a clear ValueError."""

import json
from typing import Any

import pytest
import toy_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers, processors

from quire.frontend.text.chat_template import ChatTemplateError
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.sampling import SamplingParams

CHAT = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "  Where is Zürich?  "},
    {"role": "assistant", "content": "In Switzerland", "reasoning_content": "easy"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"é": {}}}}}]


def tokenizer(backend: Backend | None = None, **config: object) -> Tokenizer:
    return Tokenizer.from_files(toy_tokenizers.files(backend, **config))


# ------------------------------------------------------------------------------------------------------------- encoding
def test_bos_is_added_to_completions_and_not_to_chats() -> None:
    tok = tokenizer(toy_tokenizers.llama2_like())
    assert tok.encode("the cat")[0] == tok.bos_token_id
    assert tok.bos_token_id not in tok.encode("the cat", add_special_tokens=False)
    assert tok.encode_batch(["the", "cat"]) == [tok.encode("the"), tok.encode("cat")]


def test_a_bos_that_only_the_configuration_asks_for_is_added_once() -> None:
    plain, asked = tokenizer(), tokenizer(add_bos_token=True)
    assert asked.encode("the") == [asked.bos_token_id, *plain.encode("the")]
    assert asked.encode_batch(["the"], add_special_tokens=False) == [plain.encode("the")]
    there_already = tokenizer(toy_tokenizers.llama2_like(), add_bos_token=True)
    assert there_already.encode("the") == tokenizer(toy_tokenizers.llama2_like()).encode("the")


def test_truncation_and_padding_of_the_file_are_ignored() -> None:
    backend = Backend.from_str(toy_tokenizers.byte_level().to_str())
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    tok = tokenizer(backend)
    assert tok.encode("hello world the cat") == tokenizer().encode("hello world the cat")


def test_lone_surrogates_are_encoded_as_the_replacement_character() -> None:
    tok = tokenizer()
    assert tok.decode(tok.encode("a\ud800b")) == "a�b"


def test_special_tokens_come_from_the_tokenizer_and_the_configuration() -> None:
    tok = tokenizer(eos_token={"content": "<|im_end|>", "special": True})
    assert tok.eos_token_id == tok.backend.token_to_id("<|im_end|>")
    assert tok.special_tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    assert tok.backend.token_to_id("<tool>") in tok.added_ids - tok.special_ids
    assert tok.vocab_size == tok.backend.get_vocab_size()


@pytest.mark.parametrize("name", toy_tokenizers.LOCAL)
def test_pieces_after_the_first_token_are_exact(name: str) -> None:
    tok = Tokenizer(toy_tokenizers.LOCAL[name]())
    ids = tok.encode("the cat's 漢字 world", add_special_tokens=False)
    text = tok.decode(ids, skip_special_tokens=False)
    rest = b"".join(tok.token_bytes(i) for i in ids[1:]).decode()
    assert text.endswith(rest) and "".join(map(tok.token_str, ids)).strip() == text.strip()


def test_a_byte_token_is_its_byte_and_an_unknown_id_is_nothing() -> None:
    tok = tokenizer(toy_tokenizers.llama2_like())
    byte = tok.backend.token_to_id("<0xF0>")
    assert (tok.token_bytes(byte), tok.token_str(byte)) == (b"\xf0", "�")
    assert tok.token_str(tok.vocab_size + 5) == ""
    assert tok.token_str(tok.eos_token_id or 0) == "</s>"


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({}, "tokenizer.json"),
        ({"tokenizer.json": b"{}"}, "tokenizer.json"),
        (toy_tokenizers.files() | {"generation_config.json": b"["}, "generation_config.json"),
        (toy_tokenizers.files() | {"tokenizer_config.json": b"[]"}, "tokenizer_config.json"),
        (toy_tokenizers.files() | {"tokenizer_config.json": b"[" * 100_000}, "tokenizer_config.json"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(files: dict[str, bytes], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Tokenizer.from_files(files)


# ---------------------------------------------------------------------------------------------------------------- chats
TEMPLATES = {
    "chatml": toy_tokenizers.CHATML,
    "tools": "{% if tools %}{% for t in tools %}{{ t | tojson }}{{ t.function.parameters | tojson(indent=2) }}{% endfor %}"
    "{% endif %}{{ messages[-1].content | trim }}{{ bos_token }}{{ documents }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% if loop.index > 2 %}{% break %}{% endif %}{{ ns.n }}{{ m['content'] }}{% endfor %}",
    "generation": "{% for m in messages %}\n  {% generation %}{{ m.content }}{% endgeneration %}\n{%- endfor %}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}{% endfor %}{{ enable_thinking }}",
    "dict": "{% for k, v in dict(a=1, b=2).items() %}{{ k }}{{ v }}{% endfor %}{{ dict.fromkeys(['x']) }}{{ eos_token }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_templates_render_as_in_transformers(name: str, with_tools: bool, add_generation_prompt: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    tools = TOOLS if with_tools else None
    documents = [{"title": "t", "text": "x"}] if with_tools else None
    kwargs = {"enable_thinking": False}
    ours = tokenizer(chat_template=TEMPLATES[name]).render_chat(
        CHAT, tools=tools, documents=documents, add_generation_prompt=add_generation_prompt, chat_template_kwargs=kwargs
    )
    theirs, _ = render_jinja_template(
        [CHAT],
        tools=tools,
        documents=documents,
        chat_template=TEMPLATES[name],
        add_generation_prompt=add_generation_prompt,
        bos_token="<s>",
        eos_token="</s>",
        **kwargs,
    )
    assert ours == theirs[0]


@pytest.mark.parametrize("final", ["The answer is", "The answer is ", " two\n"])
@pytest.mark.parametrize("trim", ["", " | trim"])
def test_continuing_the_final_message_leaves_it_open_as_in_transformers(final: str, trim: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = toy_tokenizers.CHATML.replace("m.content", "m.content" + trim)
    chat = [*CHAT, {"role": "user", "content": "?"}, {"role": "assistant", "content": final}]
    ours = tokenizer(chat_template=template).render_chat(chat, add_generation_prompt=False, continue_final_message=True)
    theirs, _ = render_jinja_template([chat], chat_template=template, continue_final_message=True)
    assert ours == theirs[0]
    assert ours.rstrip().endswith(final.strip())


def test_a_named_template_is_used_for_tools_and_on_request() -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tok = tokenizer(chat_template=named)
    assert tok.render_chat(CHAT) == "plain"
    assert tok.render_chat(CHAT, tools=TOOLS) == "tools"
    assert tok.render_chat(CHAT, chat_template="tool_use") == "tools"
    assert tok.render_chat(CHAT, chat_template="{{ messages | length }}") == "3"


def test_the_shape_of_transformers_tokenizers():
    tok = tokenizer(chat_template="{{ messages[-1].content }}{{ '!' if add_generation_prompt }}{{ mood }}")
    text = tok.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True, mood="?")
    assert text == "Hello!?"
    assert tok.apply_chat_template([{"role": "user", "content": "Hello"}]) == tok.encode("Hello", add_special_tokens=False)
    with pytest.raises(TypeError, match="return_tensors is not supported"):
        tok.apply_chat_template([{"role": "user", "content": "Hello"}], return_tensors="pt")
    assert tok.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, return_dict=False) == "Hi"


def test_the_template_file_goes_before_the_configuration() -> None:
    tok = Tokenizer.from_files(toy_tokenizers.files() | {"chat_template.jinja": b"from the file"})
    assert tok.render_chat(CHAT) == "from the file"


def test_strftime_now_gives_the_date() -> None:
    assert len(tokenizer(chat_template="{{ strftime_now('%Y-%m-%d') }}").render_chat(CHAT)) == 10


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    ("template", "content", "expected"),
    [
        ("{{ messages[0].content }}", PARTS, "one\ntwo"),
        ("{% for p in messages[0].content %}[{{ p.text }}]{% endfor %}", PARTS, "[one][two]"),
        ("{% for p in messages[0]['content'] %}[{{ p.text }}]{% endfor %}", "one", "[one]"),
        (
            "{% if messages[0].content is string %}{{ messages[0].content }}{% else %}"
            "{% for p in messages[0].content %}[{{ p.text }}]{% endfor %}{% endif %}",
            "one",
            "one",
        ),
    ],
)
def test_content_comes_in_the_form_the_template_wants(template: str, content: Any, expected: str) -> None:
    assert tokenizer(chat_template=template).render_chat([{"role": "user", "content": content}]) == expected


def test_arguments_of_tool_calls_become_objects() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    tok = tokenizer(chat_template="{{ messages[0].tool_calls[0].function.arguments.x }}")
    assert tok.render_chat([{"role": "assistant", "content": None, "tool_calls": [call]}]) == "1"
    assert tok.render_chat([{"role": "assistant", "tool_calls": [call]}]) == "1"
    call["function"]["arguments"] = "[" * 100_000
    with pytest.raises(ChatTemplateError, match="arguments"):
        tok.render_chat([{"role": "assistant", "content": None, "tool_calls": [call]}])


@pytest.mark.parametrize(
    ("template", "given", "expected"),
    [
        ("{% for c in messages[0].tool_calls %}{{ '<' + c.function.arguments + '>' }}{% endfor %}", '{"x":1}', '<{"x":1}>'),
        ("{% for c in messages[0].tool_calls %}{{ '<' + c['function']['arguments'] }}{% endfor %}", None, "<{}"),
        ("{% for c in messages[0].tool_calls %}{{ '<' + c.function.arguments }}{% endfor %}", {"x": 1}, '<{"x": 1}'),
        ("{% for c in messages[0].tool_calls %}{{ '<' + c.function.arguments | tojson }}{% endfor %}", '{"x":1}', '<{"x": 1}'),
        ("{{ messages[0].tool_calls[0].function.arguments | tojson }}", None, "{}"),
        # what a model wrote that is no object, sent back by an agent
        ("{% for c in messages[0].tool_calls %}{{ '<' + c.function.arguments + '>' }}{% endfor %}", '{"x": 1', '<{"x": 1>'),
        *(("{{ messages[0].tool_calls[0].function.arguments | tojson }}", a, "{}") for a in ('{"x": 1', "[1]", "3", [1], 3)),
    ],
)
def test_a_template_gets_arguments_as_it_takes_them(template: str, given: Any, expected: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": given}}
    assert tokenizer(chat_template=template).render_chat([{"role": "assistant", "tool_calls": [call]}]) == expected


DEEPSEEK_V3 = """{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}
{{ m.tool_calls[0].function.name }}
{% elif m['content'] is not none %}{{ '<' + m['content'] + '>' }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize("absent", [{}, {"content": None}])
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("[{{ messages[0].content }}]", "[]"),
        ("{{ 'x' in messages[0].content }}", "False"),
        ("{{ messages[0].content | length }}", "0"),
        ("[{{ messages[0].content | trim }}]", "[]"),
        ("{{ messages[0].content is defined }} {{ messages[0].content is none }}", "False False"),
        ("[{% for part in messages[0].content %}{{ part.text }}{% endfor %}]", "[]"),
        ("{{ messages[0].name is defined }}{{ messages[0].refusal }}", "False"),
        (DEEPSEEK_V3, "f\n"),
    ],
)
def test_null_in_a_message_is_absent_as_for_transformers(template: str, expected: str, absent: dict[str, Any]) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "tool_calls": [call], "name": None, "refusal": None, **absent}
    assert tokenizer(chat_template=template).render_chat([message], add_generation_prompt=False) == expected


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.more }}", "no attribute"),
        ("{{ messages[0] + 1 }}", "TypeError"),
        ("{{ ''.__class__.__mro__ }}", "refused"),
        ("{{ messages.append(1) }}", "refused"),
        ("{% set n = namespace(__class__=1) %}", "underscore"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "[Rr]ange"),
        ("{{ 'x' * 10 ** 8 }}", "longer than"),
        ("{% if %}", "not valid"),
    ],
)
def test_what_goes_wrong_in_a_template_is_the_requests_error(template: str, match: str) -> None:
    with pytest.raises(ChatTemplateError, match=match):
        tokenizer().render_chat(CHAT, chat_template=template)


@pytest.mark.parametrize(
    ("messages", "options", "match"),
    [
        ("hello", {}, "list"),
        (["hello"], {}, "role"),
        ([{"content": "x"}], {}, "role"),
        ([{"role": "user"}], {}, "must have a content"),
        ([{"role": "user", "content": None, "tool_calls": [{}]}], {}, "must have a content"),
        ([*CHAT, {"role": "user", "content": 5}], {}, f"^message {len(CHAT)}: a message's content must be"),
        ([{"role": "assistant", "tool_calls": "x"}], {}, "tool_calls must be a list of objects"),
        ([{"role": "assistant", "tool_calls": [5]}], {}, "tool_calls must be a list of objects"),
        ([{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {}}]}], {}, "of type 'function', got 'custom'"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], {}, "text only"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "messages"),
        (CHAT, {"chat_template_kwargs": {"f": object()}}, "plain JSON"),
        (CHAT, {"continue_final_message": True}, "exclude each other"),
        ([], {"continue_final_message": True, "add_generation_prompt": False}, "final message"),
    ],
)
def test_a_malformed_conversation_is_refused(messages: Any, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ChatTemplateError, match=match):
        tokenizer().render_chat(messages, **options)


@pytest.mark.parametrize("calls", [[], None])
def test_an_answer_without_content_and_calls_can_be_sent_back(calls: list | None) -> None:
    """As a client's model_dump() has it, if it was cut off early. Llama's templates ask whether there are tool_calls at all."""
    template = "{% for m in messages %}{% if 'tool_calls' in m %}calls{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
    answer = {"role": "assistant", "content": None, "refusal": None, "tool_calls": calls}
    assert tokenizer().render_chat([*CHAT[:1], answer], chat_template=template).endswith("][]")


def test_a_model_without_template_says_what_to_do() -> None:
    tok = tokenizer(chat_template=None)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tok.render_chat(CHAT)


def test_rendering_leaves_the_callers_messages_alone() -> None:
    before = json.dumps(CHAT)
    tokenizer().render_chat(CHAT, add_generation_prompt=False, continue_final_message=True)
    assert json.dumps(CHAT) == before


# --------------------------------------------------------------------------------------------------------------- params
def test_bad_words_are_forbidden_at_the_start_and_after_a_space() -> None:
    tok = tokenizer()
    params = tok.with_bad_words(SamplingParams(bad_words=["cat", "hello world"]))
    (cat,), (spaced,) = tok.encode("cat"), tok.encode(" cat")
    assert params.bad_words_token_ids == [[cat], [spaced], tok.encode("hello world"), tok.encode(" hello world")]
    assert tok.with_bad_words(params).bad_words_token_ids == params.bad_words_token_ids


def test_a_bad_word_of_several_tokens_is_forbidden_as_the_one_token_that_it_is_after_a_space() -> None:
    backend = Backend.from_str(toy_tokenizers.llama2_like().to_str())
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.add_tokens(["▁xyz"])
    tok = tokenizer(backend)
    bare = tok.encode("xyz", add_special_tokens=False)
    assert tok.with_bad_words(SamplingParams(bad_words=["xyz"])).bad_words_token_ids == [bare, [backend.token_to_id("▁xyz")]]
    assert len(bare) > 1


def test_a_bad_word_of_too_many_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="bad_words"):
        tokenizer().with_bad_words(SamplingParams(bad_words=["xyz " * 10]))


def test_params_without_bad_words_are_the_same_object() -> None:
    params = SamplingParams()
    assert tokenizer().with_bad_words(params) is params


def test_generation_defaults_are_of_the_file() -> None:
    assert tokenizer().generation_defaults == {}
    files = toy_tokenizers.files() | {"generation_config.json": b'{"temperature": 0.6, "max_new_tokens": 5}'}
    assert Tokenizer.from_files(files).generation_defaults == {"temperature": 0.6, "max_tokens": 5}
    with pytest.raises(ValueError, match=r"generation_config\.json: top_p"):
        Tokenizer.from_files(files | {"generation_config.json": b'{"top_p": 7}'})


def test_a_post_processor_for_pairs_does_not_disturb_single_texts() -> None:
    backend = Backend.from_str(toy_tokenizers.wordpiece().to_str())
    ids = {t: backend.token_to_id(t) for t in ("<s>", "</s>")}
    backend.post_processor = processors.BertProcessing(("</s>", ids["</s>"]), ("<s>", ids["<s>"]))
    assert tokenizer(backend).encode("hello") == [ids["<s>"], backend.token_to_id("hello"), ids["</s>"]]
