// Prometheus' text format: samples by name, and changes between two scrapes. Pure functions: no network, no DOM.

const SAMPLE = /^([A-Za-z_:][\w:]*)(\{[^\n]*\})?\s+(\S+)/;

// Values summed over labels, by name; buckets are left out.
export function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    if (!line || line[0] === "#") continue;
    const match = SAMPLE.exec(line);
    if (match === null || match[1].endsWith("_bucket")) continue;
    const value = match[3] === "+Inf" ? Infinity : match[3] === "-Inf" ? -Infinity : Number(match[3]);
    found.set(match[1], (found.get(match[1]) ?? 0) + value);
  }
  return found;
}

// Growth per second of a counter; null if it is missing or was reset.
export function rate(before, after, name, seconds) {
  const a = before?.get(name), b = after.get(name);
  return a === undefined || b === undefined || b < a || !(seconds > 0) ? null : (b - a) / seconds;
}

// Mean of a histogram's observations between two scrapes; null if there are none.
export function mean(before, after, name) {
  const count = (after.get(`${name}_count`) ?? 0) - (before?.get(`${name}_count`) ?? 0);
  const sum = (after.get(`${name}_sum`) ?? 0) - (before?.get(`${name}_sum`) ?? 0);
  return before && count > 0 ? sum / count : null;
}
