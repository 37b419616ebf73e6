// ai with @ai-sdk/openai: responses, which is this provider's own way.

import { createOpenAI } from "@ai-sdk/openai";
import { BASE_URL, KEY, MODEL } from "./asks.mjs";
import { ask } from "./asks_ai.mjs";

await ask("@ai-sdk/openai", createOpenAI({ baseURL: `${BASE_URL}/v1`, apiKey: KEY })(MODEL));
