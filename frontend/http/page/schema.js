// Checks a JSON Schema before it is sent: what is said about a field names its place. Pure: no network, no DOM.
//
// It finds what no schema may be; keywords that a server does not know are the server's to refuse.

const TYPES = ["string", "number", "integer", "boolean", "object", "array", "null"];
const SCHEMAS = ["items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames", "additionalItems"];
const LISTS = ["anyOf", "oneOf", "allOf", "prefixItems"];
const MAPS = ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];
const COUNTS = ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains"];
const NUMBERS = ["minimum", "maximum"];
const MAX_DEPTH = 100;

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

// What is wrong with the schema, as a sentence, or "".
export function problem(schema) {
  return isObject(schema) ? inSchema(schema, "", schema, 0) : "A schema is a JSON object, such as {\"type\": \"object\"}.";
}

function inSchema(schema, place, root, depth) {
  const at = (key) => (place ? `${place}.${key}` : key);
  if (typeof schema === "boolean") return "";
  if (!isObject(schema)) return `${place} is no schema: it must be an object, or true or false.`;
  if (depth > MAX_DEPTH) return `${place} is nested more than ${MAX_DEPTH} levels deep.`;
  const own = inValues(schema, at, root);
  if (own) return own;
  for (const [key, below] of nested(schema)) {
    if (below === null) return `${at(key)} must be ${MAPS.includes(key) ? "an object of schemas" : "a list of at least one schema"}.`;
    for (const [name, one] of below) {
      const found = inSchema(one, name === "" ? at(key) : `${at(key)}.${name}`, root, depth + 1);
      if (found) return found;
    }
  }
  return "";
}

// The schemas in a schema: [keyword, [[name, schema], ...]], or null for what is not such a list.
function nested(schema) {
  const found = [];
  for (const key of SCHEMAS) {
    if (key in schema) found.push([key, Array.isArray(schema[key]) && key === "items" ? [...schema[key].entries()] : [["", schema[key]]]]);
  }
  for (const key of LISTS) if (key in schema) found.push([key, Array.isArray(schema[key]) && schema[key].length ? [...schema[key].entries()] : null]);
  for (const key of MAPS) if (key in schema) found.push([key, isObject(schema[key]) ? Object.entries(schema[key]) : null]);
  return found;
}

function inValues(schema, at, root) {
  const { type, required, pattern, $ref: ref } = schema;
  const types = Array.isArray(type) ? type : [type];
  if ("type" in schema && !(types.length && types.every((one) => TYPES.includes(one)))) {
    return `${at("type")} is ${JSON.stringify(type)}, but must be one of ${TYPES.join(", ")}.`;
  }
  if ("enum" in schema && !(Array.isArray(schema.enum) && schema.enum.length)) return `${at("enum")} must be a list of at least one value.`;
  if ("required" in schema && !(Array.isArray(required) && required.every((name) => typeof name === "string"))) {
    return `${at("required")} must be a list of names.`;
  }
  for (const key of COUNTS) if (key in schema && !(Number.isInteger(schema[key]) && schema[key] >= 0)) return `${at(key)} must be a number from 0 on.`;
  for (const key of NUMBERS) if (key in schema && typeof schema[key] !== "number") return `${at(key)} must be a number.`;
  if ("pattern" in schema && !isPattern(pattern)) return `${at("pattern")} must be a regular expression.`;
  if ("$ref" in schema && !leadsSomewhere(ref, root)) return `${at("$ref")} is ${JSON.stringify(ref)}, which is not in this schema.`;
  return "";
}

function isPattern(pattern) {
  try {
    return typeof pattern === "string" && Boolean(new RegExp(pattern, "u"));
  } catch {
    return false;
  }
}

function leadsSomewhere(ref, root) {
  if (typeof ref !== "string" || !ref.startsWith("#")) return false;
  if (!ref.startsWith("#/")) return true; // the whole, or an anchor
  let at = root;
  for (const part of ref.slice(2).split("/")) {
    const name = part.replaceAll("~1", "/").replaceAll("~0", "~");
    if (typeof at !== "object" || at === null || !Object.hasOwn(at, name)) return false;
    at = at[name];
  }
  return true;
}

// What is wrong with a list of tools, as a sentence, or "".
export function problemOfTools(tools) {
  if (!Array.isArray(tools) || !tools.length) return 'Tools are a JSON list, such as [{"type": "function", "function": {"name": "f"}}].';
  for (const [i, tool] of tools.entries()) {
    if (tool?.type !== "function" || !tool.function?.name) return `Tool ${i + 1} must have a type "function" and a function with a name.`;
    const found = tool.function.parameters === undefined ? "" : problem(tool.function.parameters);
    if (found) return `Tool ${i + 1}, parameters: ${found}`;
  }
  return "";
}
