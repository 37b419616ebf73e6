"""LlamaIndex's OpenAILike: chats, a tool, and a class by structured_predict."""

from asks import BASE_URL, CHAT, KEY, MAX_TOKENS, MODEL, PERSON, WEATHER, Found, Person
from llama_index.core.llms import ChatMessage
from llama_index.core.program import LLMTextCompletionProgram  # noqa: F401
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return "5"


found = Found("llama-index-core", "llama-index-llms-openai-like")
options = {
    "model": MODEL,
    "api_base": f"{BASE_URL}/v1",
    "api_key": KEY,
    "temperature": 0,
    "max_tokens": MAX_TOKENS,
    "max_retries": 0,
}
model = OpenAILike(is_chat_model=True, is_function_calling_model=True, context_window=2048, **options)
asked = [ChatMessage(role="user", content=CHAT)]
found.chat(model.chat(asked).message.content, [part.delta for part in model.stream_chat(asked)])
answer = model.chat_with_tools([FunctionTool.from_defaults(get_weather)], user_msg=WEATHER)
(call,) = model.get_tool_calls_from_response(answer)
found.tool(call.tool_name, call.tool_kwargs)
structured = OpenAILike(is_chat_model=True, should_use_structured_outputs=True, context_window=2048, **options)
found.structured(structured.structured_predict(Person, PromptTemplate(PERSON)))
found.say()
