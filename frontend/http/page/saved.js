// What a reload keeps: the conversation, the message that is being written, and the settings, but never the API key.
//
// They are in sessionStorage: each tab has its own, and they are gone when it is closed. "New chat" removes the conversation.

const KEY = "quire-chat";
const SETTINGS = "quire-settings";
export const MOST = 1_000_000; // characters of a conversation; its oldest questions and answers go first

// Returns {entries, draft, cut}; cut: whether older entries were left out.
export function load() {
  try {
    const found = JSON.parse(sessionStorage.getItem(KEY)) ?? {};
    if (Array.isArray(found.entries)) return found;
  } catch {
    // not what this page has written
  }
  return { entries: [], draft: "", cut: false };
}

export function save({ entries, draft, cut }) {
  const kept = newest(entries);
  if (!kept.length && !draft) return store(KEY, null);
  store(KEY, JSON.stringify({ entries: kept, draft: draft.slice(0, MOST), cut: cut || kept.length < entries.length }));
}

// The newest entries that fit, from a question on. Pure.
export function newest(entries, most = MOST) {
  let begin = entries.length, size = 0;
  for (let i = entries.length - 1; i >= 0; i--) {
    size += JSON.stringify(entries[i]).length;
    if (size > most) break;
    if (entries[i].role === "user") begin = i;
  }
  return entries.slice(begin);
}

export function loadSettings() {
  try {
    return JSON.parse(sessionStorage.getItem(SETTINGS)) ?? {};
  } catch {
    return {};
  }
}

export function saveSettings(values) {
  store(SETTINGS, JSON.stringify(values));
}

// Storage may be full or forbidden: the page then works without it.
function store(key, text) {
  try {
    if (text === null) sessionStorage.removeItem(key);
    else sessionStorage.setItem(key, text);
  } catch {
    sessionStorageIsFull(key);
  }
}

function sessionStorageIsFull(key) {
  try {
    sessionStorage.removeItem(key); // an old copy would come back as if it were the newest
  } catch {
    // forbidden: nothing is there
  }
}
