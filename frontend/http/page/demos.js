// Initial values of the tool and JSON demos, and the functions that this page can answer by itself.

export const TOOLS = [
  tool("multiply", "Multiply two numbers.", { a: "integer", b: "integer" }),
  tool("get_time", "Get the local time in a city.", { city: "string" }),
];

export const SCHEMA = {
  type: "object",
  properties: {
    name: { type: "string" },
    age: { type: "integer" },
    hobbies: { type: "array", items: { type: "string" }, maxItems: 3 },
  },
  required: ["name", "age", "hobbies"],
  additionalProperties: false,
};

export const HINTS = {
  none: "",
  tools: "The model may call these functions; the page answers multiply and get_time itself. Try: What is 12 times 34?",
  json: "The answer is JSON of this form. Try: Describe a person.",
};

function tool(name, description, types) {
  const properties = Object.fromEntries(Object.entries(types).map(([key, type]) => [key, { type }]));
  return { type: "function", function: { name, description, parameters: { type: "object", properties, required: Object.keys(types) } } };
}

// The result of a call as text; null for a function that only the user knows.
export function answer(name, argumentsText) {
  let given;
  try {
    given = JSON.parse(argumentsText || "{}") ?? {}; // a model may write null
  } catch {
    return "error: the arguments are not JSON";
  }
  if (name === "multiply") return String(Number(given.a) * Number(given.b));
  if (name === "get_time") return `${new Date().toTimeString().slice(0, 5)} (this browser's time, wherever ${given.city} is)`;
  return null;
}
