// What the three scripts of the package ai have in common: a chat, a call and an object with one of its providers.

import { Output, generateText, streamText, tool } from "ai";
import { CHAT, City, DESCRIPTION, MAX_TOKENS, PERSON, Person, WEATHER, gathered, say } from "./asks.mjs";

export async function ask(provider, model) {
  const options = { model, temperature: 0, maxOutputTokens: MAX_TOKENS, maxRetries: 0 };
  const whole = await generateText({ prompt: CHAT, ...options });
  const stream = streamText({ prompt: CHAT, ...options, onError: ({ error }) => { throw error; } });
  const parts = await gathered(stream.textStream);
  const tools = { get_weather: tool({ description: DESCRIPTION, inputSchema: City }) };
  const called = await generateText({ prompt: WEATHER, tools, ...options });
  const person = await generateText({ prompt: PERSON, output: Output.object({ schema: Person }), ...options });
  const [call] = called.toolCalls;
  say(["ai", provider], {
    chat: { whole: whole.text, parts },
    tool: { name: call.toolName, arguments: call.input },
    structured: person.output,
  });
}
