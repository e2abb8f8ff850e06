// Where the KV of a prompt came from.

import { bar, h } from "./dom.js";
import { count } from "./format.js";

export const SOURCES = [["worker", "a worker's own pages"], ["gpu", "GPU tier"], ["host", "host tier"], ["nvme", "NVMe tier"], ["remote", "another host"], ["computed", "computed"]];

/** Of `tokens` of a record, as a bar. */
export function sourceBar(tokens) {
  const of = (name) => (name === "computed" ? tokens.computed : tokens.cached[name] ?? 0);
  const some = SOURCES.filter(([name]) => of(name));
  const label = some.map(([name]) => `${count(of(name))} ${name}`).join(", ") || "nothing was computed";
  return bar(some.map(([name]) => [of(name) / Math.max(1, tokens.prompt), name]), `Prompt: ${label}`);
}

export function sourceLegend() {
  return h("ul", { class: "legend" }, SOURCES.map(([name, text]) => h("li", { class: name }, text)));
}
