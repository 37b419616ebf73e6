// Puts the page together: the API's client, settings, the conversation, the charts.

import { Chat } from "./chat.js";
import { Client } from "./client.js";
import { Live } from "./live.js";
import { Settings } from "./settings.js";

const get = (id) => document.getElementById(id);
const client = new Client();

async function listModels() {
  const select = get("model"), chosen = select.value;
  try {
    const names = (await client.models()).map((model) => model.id);
    select.replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
    get("error").hidden = true;
  } catch (error) {
    get("error").textContent = error.message;
    get("error").hidden = false;
  }
}

const settings = new Settings(get, client, () => {
  listModels();
  live.schedule(0);
});
new Chat(get, client, settings);
const live = new Live(
  { charts: get("charts"), error: get("live-error"), engine: get("engine"), polling: get("polling") },
  (path) => client.text(path),
);
listModels();
