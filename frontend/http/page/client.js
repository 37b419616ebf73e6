// The server's API: requests with the key, errors as text, a chat completion as a stream of deltas. No DOM.

import { EventDecoder } from "./sse.js";

const BROKEN_OFF = "The answer broke off.";

export class Client {
  key = "";

  headers() {
    return { "Content-Type": "application/json", ...(this.key ? { Authorization: `Bearer ${this.key}` } : {}) };
  }

  async fetch(path, options = {}) {
    let response;
    try {
      response = await fetch(path, { ...options, headers: this.headers(), cache: "no-store", credentials: "omit" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("The server cannot be reached.");
    }
    if (!response.ok) throw await problem(response, this.key !== "");
    return response;
  }

  async text(path) {
    return (await this.fetch(path)).text();
  }

  async models() {
    return (await (await this.fetch("v1/models")).json()).data;
  }

  // Calls onChunk with each chunk of the stream, or once with a whole answer in a chunk's form.
  async chat(body, signal, onChunk) {
    const response = await this.fetch("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
    if (!body.stream) {
      const whole = await response.json();
      const choices = whole.choices.map((choice) => ({ ...choice, delta: choice.message }));
      return onChunk({ ...whole, choices });
    }
    const decoder = new EventDecoder(), reader = response.body.getReader();
    for (;;) {
      const { done, value } = await nextPiece(reader);
      if (done) throw new Error(BROKEN_OFF);
      for (const data of decoder.push(value)) {
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        onChunk(chunk);
      }
    }
  }
}

async function nextPiece(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error(BROKEN_OFF); // browsers say "network error", "Error in input stream", "Load failed"
  }
}

// A refusal as an Error with the response's status, and the name of the field that is to blame, if the server says it.
async function problem(response, hasKey) {
  const text = await response.text();
  let message = text.slice(0, 500), param = null;
  try {
    ({ message, param } = JSON.parse(text).error);
  } catch {
    // not our JSON, but perhaps a proxy's page
  }
  if (response.status === 401) {
    message = hasKey ? "The server does not know this API key: correct it under Settings." : "This server needs an API key: enter it under Settings.";
  }
  return Object.assign(new Error(`${message || response.statusText} (HTTP ${response.status})`), { status: response.status, param });
}

// A message that grows with the deltas of its stream: content, reasoning, tool calls.
export class Answer {
  content = "";
  reasoning = "";
  calls = [];
  finishReason = null;

  add(chunk) {
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const delta = choice.delta ?? {};
    this.content += delta.content ?? "";
    this.reasoning += delta.reasoning ?? delta.reasoning_content ?? "";
    (delta.tool_calls ?? []).forEach((part, i) => {
      const call = (this.calls[part.index ?? i] ??= { id: "", name: "", arguments: "" });
      call.id = part.id ?? call.id;
      call.name += part.function?.name ?? "";
      call.arguments += part.function?.arguments ?? "";
    });
    this.finishReason = choice.finish_reason ?? this.finishReason;
  }

  get isEmpty() {
    return !this.content && !this.reasoning && !this.calls.length;
  }
}
