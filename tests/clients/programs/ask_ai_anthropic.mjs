// ai with @ai-sdk/anthropic: messages.

import { createAnthropic } from "@ai-sdk/anthropic";
import { BASE_URL, KEY, MODEL } from "./asks.mjs";
import { ask } from "./asks_ai.mjs";

await ask("@ai-sdk/anthropic", createAnthropic({ baseURL: `${BASE_URL}/v1`, apiKey: KEY })(MODEL));
