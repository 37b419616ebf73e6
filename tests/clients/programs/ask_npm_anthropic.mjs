// npm's @anthropic-ai/sdk: messages.

import Anthropic from "@anthropic-ai/sdk";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import {
  BASE_URL, CHAT, DESCRIPTION, KEY, MAX_TOKENS, MODEL, PERSON, Person, WEATHER, WEATHER_PARAMETERS, messages, say,
} from "./asks.mjs";

const client = new Anthropic({ baseURL: BASE_URL, apiKey: KEY, maxRetries: 0 });
const options = { model: MODEL, max_tokens: MAX_TOKENS };
const whole = await client.messages.create({ messages: messages(CHAT), ...options });
const parts = [];
await client.messages.stream({ messages: messages(CHAT), ...options }).on("text", (text) => parts.push(text)).finalMessage();
const tools = [{ name: "get_weather", description: DESCRIPTION, input_schema: WEATHER_PARAMETERS }];
const answer = await client.messages.create({ messages: messages(WEATHER), tools, ...options });
const call = answer.content.find((block) => block.type === "tool_use");
const output_config = { format: zodOutputFormat(Person) };
const parsed = await client.messages.parse({ messages: messages(PERSON), output_config, ...options });
say(["@anthropic-ai/sdk"], {
  chat: { whole: whole.content[0].text, parts },
  tool: { name: call.name, arguments: call.input },
  structured: parsed.parsed_output,
});
