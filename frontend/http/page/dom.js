// Makes an element by name, with attributes and text. The page has no other way from text to elements.

export function element(name, attributes = {}, text = "") {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.append(text);
  return made;
}
