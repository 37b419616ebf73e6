// Questions for the clients of npm, and the line of JSON that each client's script prints: see asks.py, whose texts these are.
// A script is `node NAME.mjs BASE_URL KEY MODEL`. installed.py copies the scripts to where the packages are.

import { readFileSync } from "node:fs";
import { join } from "node:path";
import { z } from "zod";

export const [BASE_URL, KEY, MODEL] = process.argv.slice(2);
export const CHAT = "Tell me about a dog.";
export const WEATHER = "What is the weather in Paris?";
export const PERSON = "Tell me about a person";
export const MAX_TOKENS = 300;

export const City = z.object({ city: z.string() });
export const WEATHER_PARAMETERS = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
export const DESCRIPTION = "Get the weather of a city.";
export const Person = z.strictObject({ name: z.enum(["Ann", "Tom"]), age: z.number().int().min(0).max(99) });

export const messages = (text) => [{ role: "user", content: text }];

const versionOf = (name) =>
  JSON.parse(readFileSync(join(import.meta.dirname, "node_modules", name, "package.json"), "utf8")).version;

// packages: whose versions are told. chat, tool, structured: as asks.py has them.
export function say(packages, { chat, tool, structured }) {
  const parts = chat.parts.filter((part) => part);
  console.log(JSON.stringify({ version: packages.map(versionOf).join(", "), chat: { ...chat, parts }, tool, structured }));
}

export async function gathered(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
}
