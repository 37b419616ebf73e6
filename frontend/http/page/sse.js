// Server-sent events from the chunks of a response's body, however it is cut. Pure: no network, no DOM.

export class EventDecoder {
  #decoder = new TextDecoder();
  #rest = "";

  // piece: Uint8Array. Returns the data of every event that is complete now.
  push(piece) {
    this.#rest += this.#decoder.decode(piece, { stream: true });
    const events = [];
    for (;;) {
      const end = this.#rest.search(/\r?\n\r?\n/);
      if (end < 0) return events;
      const lines = this.#rest.slice(0, end).split(/\r?\n/);
      this.#rest = this.#rest.slice(end).replace(/^\r?\n\r?\n/, "");
      const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).replace(/^ /, ""));
      if (data.length) events.push(data.join("\n"));
    }
  }
}
