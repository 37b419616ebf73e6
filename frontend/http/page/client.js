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
    if (!response.ok) throw new Error(await problem(response));
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

async function problem(response) {
  const text = await response.text();
  let message = text.slice(0, 500);
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // not our JSON, but perhaps a proxy's page
  }
  if (response.status === 401) message = "This server needs an API key: enter it under Settings.";
  return `${message || response.statusText} (HTTP ${response.status})`;
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

  message() {
    const tool_calls = this.calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
    return { role: "assistant", content: this.content || null, ...(tool_calls.length ? { tool_calls } : {}) };
  }
}
