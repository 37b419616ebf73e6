// Tokens and times of one answer, as this page has measured them.

export class Figures {
  began = performance.now();
  first = 0;
  usage = null;

  add(chunk) {
    const delta = chunk.choices?.[0]?.delta;
    const hasText = delta?.content || delta?.reasoning || delta?.reasoning_content || delta?.tool_calls;
    if (!this.first && hasText) this.first = performance.now();
    this.usage = chunk.usage ?? this.usage;
  }

  text(reason) {
    const words = [];
    if (this.usage) words.push(`${this.usage.prompt_tokens} tokens in, ${this.usage.completion_tokens} tokens out`);
    if (this.first) words.push(`first after ${Math.round(this.first - this.began)} ms`);
    const seconds = (performance.now() - this.first) / 1000;
    if (this.usage && this.first && seconds > 0.05) words.push(`${Math.round(this.usage.completion_tokens / seconds)} tok/s`);
    if (reason) words.push(reason);
    return words.join(" · ");
  }
}
