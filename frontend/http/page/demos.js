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
    city: { type: "string" },
  },
  required: ["name", "age", "city"],
  additionalProperties: false,
};

export const HINTS = {
  none: "",
  tools: "The model may call these functions; the page answers multiply and get_time itself.",
  json: "The answer is JSON of this form.",
};

// Questions to click; the bundled model can answer them.
export const PROMPTS = {
  none: ["What is the capital of France?", "What is 417 plus 268?", "Sort these words: pear, apple, fig"],
  tools: ["What is 12 times 34?", "Multiply 7 by 91.", "Multiply 23 by 19 and 12 by 34."],
  json: [
    "Give me a JSON object with name Tom, age 31 and city Paris.",
    "Convert to JSON: name is Anna, age is 7, city is Oslo",
    "Make a JSON object with name Emma, age 58 and city Tokyo.",
  ],
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
  if (name === "get_time") return timeIn(String(given.city));
  return null;
}

// The browser knows the time zones that are named after a city: Europe/Oslo, America/New_York.
function timeIn(city) {
  const end = `/${city.split(",")[0].trim().replaceAll(" ", "_")}`.toLowerCase();
  const timeZone = Intl.supportedValuesOf("timeZone").find((zone) => zone.toLowerCase().endsWith(end));
  if (!timeZone) return "error: this browser knows no time zone of that name";
  return new Date().toLocaleTimeString("en-GB", { timeZone, hour: "2-digit", minute: "2-digit" });
}
