// npm's ollama, over /api.

import { Ollama } from "ollama";
import { z } from "zod";
import {
  BASE_URL, CHAT, DESCRIPTION, KEY, MAX_TOKENS, MODEL, PERSON, Person, WEATHER, WEATHER_PARAMETERS, gathered, messages, say,
} from "./asks.mjs";

const client = new Ollama({ host: BASE_URL, headers: { Authorization: `Bearer ${KEY}` } });
const options = { model: MODEL, options: { temperature: 0, num_predict: MAX_TOKENS } };
const whole = await client.chat({ messages: messages(CHAT), ...options });
const chunks = await gathered(await client.chat({ messages: messages(CHAT), stream: true, ...options }));
const tools = [{ type: "function", function: { name: "get_weather", description: DESCRIPTION, parameters: WEATHER_PARAMETERS } }];
const answer = await client.chat({ messages: messages(WEATHER), tools, ...options });
const [call] = answer.message.tool_calls;
const json = await client.chat({ messages: messages(PERSON), format: z.toJSONSchema(Person), ...options });
say(["ollama"], {
  chat: { whole: whole.message.content, parts: chunks.map((chunk) => chunk.message.content) },
  tool: { name: call.function.name, arguments: call.function.arguments },
  structured: JSON.parse(json.message.content),
});
