// npm's openai: chat completions.

import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import {
  BASE_URL, CHAT, DESCRIPTION, KEY, MAX_TOKENS, MODEL, PERSON, Person, WEATHER, WEATHER_PARAMETERS, gathered, messages, say,
} from "./asks.mjs";

const client = new OpenAI({ baseURL: `${BASE_URL}/v1`, apiKey: KEY, maxRetries: 0 });
const options = { model: MODEL, temperature: 0, max_tokens: MAX_TOKENS };
const whole = await client.chat.completions.create({ messages: messages(CHAT), ...options });
const stream = await client.chat.completions.create({ messages: messages(CHAT), stream: true, ...options });
const chunks = await gathered(stream);
const tools = [{ type: "function", function: { name: "get_weather", description: DESCRIPTION, parameters: WEATHER_PARAMETERS } }];
const answer = await client.chat.completions.create({ messages: messages(WEATHER), tools, ...options });
const [call] = answer.choices[0].message.tool_calls;
const response_format = zodResponseFormat(Person, "Person");
const parsed = await client.chat.completions.parse({ messages: messages(PERSON), response_format, ...options });
say(["openai"], {
  chat: { whole: whole.choices[0].message.content, parts: chunks.map((chunk) => chunk.choices[0].delta.content) },
  tool: { name: call.function.name, arguments: JSON.parse(call.function.arguments) },
  structured: parsed.choices[0].message.parsed,
});
