// The charts: /metrics every two seconds while the page is visible, as rates and means between two scrapes.

import { Chart } from "./charts.js";
import { mean, parseMetrics, rate } from "./prometheus.js";

const INTERVAL_MS = 2000;

const number = (value) => (value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(1));
const milliseconds = (value) => (value >= 1 ? `${value.toFixed(2)} s` : `${(value * 1000).toFixed(value < 0.01 ? 2 : 0)} ms`);
const percent = (value) => `${(value * 100).toFixed(1)} %`;

export class Live {
  // fetchText: (path) => Promise of the body's text, rejected with an Error for the user.
  constructor({ charts, error, engine, polling }, fetchText) {
    this.fetchText = fetchText;
    this.error = error;
    this.engine = engine;
    this.polling = polling;
    this.before = null;
    this.throughput = new Chart(charts, { title: "Throughput", series: [
      { label: "generated", format: (v) => `${number(v)} tok/s` }, { label: "prompt", format: (v) => `${number(v)} tok/s` } ] });
    this.latency = new Chart(charts, { title: "Latency (mean)", series: [
      { label: "first token", format: milliseconds }, { label: "next token", format: milliseconds } ] });
    this.batch = new Chart(charts, { title: "Batch", series: [
      { label: "running", format: String }, { label: "waiting", format: String } ] });
    this.cache = new Chart(charts, { title: "KV cache", top: 1, series: [{ label: "used", format: percent }] });
    this.timer = null;
    polling.addEventListener("change", () => this.schedule(0));
    document.addEventListener("visibilitychange", () => this.schedule(0));
    this.schedule(0);
  }

  schedule(delay) {
    clearTimeout(this.timer);
    if (this.polling.checked && !document.hidden) this.timer = setTimeout(() => this.poll(), delay);
  }

  async poll() {
    try {
      this.show(parseMetrics(await this.fetchText("metrics")), performance.now() / 1000);
      this.error.hidden = true;
    } catch (error) {
      this.before = null;
      for (const chart of [this.throughput, this.latency, this.batch, this.cache]) chart.addGap();
      this.engine.textContent = "No connection";
      this.error.textContent = error.message;
      this.error.hidden = false;
    }
    this.schedule(INTERVAL_MS);
  }

  show(now, time) {
    const { values: before = null, time: since = time } = this.before ?? {};
    this.before = { values: now, time };
    const up = now.get("quire:engine_up") === 1;
    this.engine.textContent = up ? "Engine ready" : "The engine does not serve";
    const gauge = (name) => (up ? now.get(name) ?? null : null);
    const seconds = time - since;
    this.throughput.add([rate(before, now, "vllm:generation_tokens_total", seconds), rate(before, now, "vllm:prompt_tokens_total", seconds)]);
    this.latency.add([mean(before, now, "vllm:time_to_first_token_seconds"), mean(before, now, "vllm:inter_token_latency_seconds")]);
    this.batch.add([gauge("vllm:num_requests_running"), gauge("vllm:num_requests_waiting")]);
    this.cache.add([gauge("vllm:kv_cache_usage_perc")]);
  }
}
