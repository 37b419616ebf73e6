"""The grammar of tool_choice "required": schemas of functions stand in it as they would by themselves."""

import json

import pytest
from toy_tokenizers import byte_level

from quire.enginecore.grammar.trial import judge
from quire.enginecore.grammar.vocabulary import make_vocabulary
from quire.frontend.http.api.tool_grammar import required_schema, tool_grammar
from quire.frontend.http.api.tool_use import Function, ToolUse

VOCABULARY = make_vocabulary(byte_level().to_str().encode(), 512)
B = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "null"}}}
HERE = {"$ref": "#/$defs/tool0/$defs/b"}


@pytest.mark.parametrize(
    ("parameters", "found"),
    [
        (B, HERE),
        ({"$id": "https://x.y/z", **B}, HERE),
        ({"$id": "https://x.y/z", **B, "properties": {"a": {"$ref": "https://x.y/z#/$defs/b"}}}, HERE),
        ({**B, "properties": {"a": {"$id": "/c", **B}}}, {"$id": "/c", **B}),
        ({**B, "properties": {"a": {"const": HERE}}}, {"const": HERE}),
    ],
)
def test_references_lead_where_they_led(parameters, found):
    functions = [Function("f", parameters, strict=True), Function("g")]
    assert required_schema(functions, True)["$defs"]["tool0"]["properties"]["a"] == found
    grammar = tool_grammar(ToolUse("required", functions), None)
    assert json.loads(grammar.text)["$defs"]["tool0"].get("$id") is None
    assert judge(grammar, VOCABULARY).error == ""
