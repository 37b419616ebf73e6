// ai with @ai-sdk/openai-compatible: chat completions.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { BASE_URL, KEY, MODEL } from "./asks.mjs";
import { ask } from "./asks_ai.mjs";

const options = { name: "quire", baseURL: `${BASE_URL}/v1`, apiKey: KEY, supportsStructuredOutputs: true };
await ask("@ai-sdk/openai-compatible", createOpenAICompatible(options)(MODEL));
