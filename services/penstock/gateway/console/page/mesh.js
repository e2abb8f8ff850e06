// The mesh: topology, what was done of late, workers and tiers.

import { Chart } from "./charts.js";
import { bar, h, keyed, s, table, tile } from "./dom.js";
import { bytes, count, rate, seconds, share, short } from "./format.js";
import { History } from "./rates.js";
import { draw } from "./topology.js";

const history = new History(); // goes on while other views are shown, as far as they let it
const TINTS = ["c1", "c2", "c3", "c4", "c5", "c6"];
const BUSY_S = 2; // a queue that fills its bar

export function meshView() {
  const tiles = h("dl", { class: "tiles" });
  const svg = s("svg", { role: "img", width: "100%" });
  const picture = h("div", { class: "picture" }, svg);
  const legend = h("ul", { class: "legend" },
    ...[["tokens", "tokens to clients"], ["handoff", "prompts handed to decode"], ["fetch", "KV fetched from stores"], ["draft", "drafts"]]
      .map(([kind, text]) => h("li", { class: kind }, text)));
  const speed = new Chart("Throughput", "tokens/s", rate, 10);
  const queue = new Chart("Queue of each worker", "seconds", seconds, 0.01);
  const workers = table("Workers", [["Worker"], ["Role"], ["State"], ["Model"], ["Queue", "wide"], ["Batch", "wide"], ["KV memory", "wide"],
    ["Computes", "end"], ["Step", "end"], ["From cache", "end"], ["Drafts right", "end"]]);
  const stores = table("Stores", [["Store"], ["State"], ["Tier"], ["Filled", "wide"], ["Used", "end"], ["Blocks", "end"], ["Given", "end"], ["Evicted", "end"], ["Hits", "end"]]);
  const element = h("div", { class: "view" },
    h("h1", { class: "unseen" }, "Mesh"),
    tiles,
    h("section", { class: "panel" }, h("div", { class: "top" }, h("h2", {}, "Topology"), legend), picture),
    h("div", { class: "pair" }, h("div", { class: "panel" }, speed.element), h("div", { class: "panel" }, queue.element)),
    h("section", { class: "panel" }, h("h2", {}, "Workers"), workers.element),
    h("section", { class: "panel" }, h("h2", {}, "Tiers"), stores.element));
  let last = null;
  const redraw = () => last && draw(svg, last, history.rates);
  const sizes = new ResizeObserver(redraw);
  sizes.observe(picture);

  return {
    element,
    title: "Mesh",
    path: "top",
    everyMs: 1000,
    take(frame) {
      last = frame;
      history.add(frame, Date.now() / 1000);
      tiles.replaceChildren(...tilesOf(frame, history.rates.total));
      redraw();
      lines(speed, queue, frame);
      keyed(workers.body, frame.workers, (one) => one.id, workerRow);
      keyed(stores.body, frame.stores.flatMap(tierRows), (one) => `${one.id} ${one.tier.tier}`, tierRow);
    },
    close() {
      sizes.disconnect();
      speed.close();
      queue.close();
    },
  };
}

function tilesOf(frame, total) {
  const { hit_rates: hits } = frame.total;
  const waiting = Math.max(0, ...frame.workers.map((one) => one.queue_s));
  return [
    tile("In flight", count(frame.requests), "requests", `${frame.held} held back`),
    tile("Longest queue", ...split(seconds(waiting)), `${frame.total.running} sequences in batches`),
    tile("Generated", rate(total.generated), "tok/s", `${count(frame.total.generated_tokens)} since the start`),
    tile("Prompts computed", rate(total.computed), "tok/s", `${rate(total.cached)} tok/s from caches`),
    tile("From caches", ...split(share(hits && 1 - hits.computed)), "of all prompt tokens"),
    tile("Drafts accepted", ...split(share(frame.total.acceptance)), `${count(frame.total.drafted_tokens)} verified`),
    tile("Sessions", count(frame.sessions), "", "remembered"),
    tile("Index", count(frame.indexed_blocks), "blocks", `router ${short(frame.router, 12)}`),
  ];
}

function split(text) {
  const [number, unit = ""] = text.split(" ");
  return [number, unit];
}

function lines(speed, queue, frame) {
  const points = history.points;
  const at = points.map((point) => point.at);
  const of = (name) => points.map((point) => point.rates.total[name]);
  speed.show([["generated", "c1"], ["computed", "c2"], ["from caches", "c3"]], [at, of("generated"), of("computed"), of("cached")]);
  const busiest = [...frame.workers].sort((one, other) => other.queue_s - one.queue_s).slice(0, TINTS.length);
  const named = busiest.map((one) => one.id).sort();
  const roles = new Map(frame.workers.map((one) => [one.id, `${one.role} ${one.address.split(":").at(-1)}`]));
  queue.show(named.map((id, number) => [roles.get(id), TINTS[number]]),
    [at, ...named.map((id) => points.map((point) => point.workers.get(id)?.queue_s ?? null))]);
}

const numbered = (parts, label, text) => h("span", { class: "measured" }, bar(parts, label), h("span", {}, text));
const stated = (state) => h("span", { class: `badge ${state}` }, state);

function workerRow(one) {
  const step = one.decode_step_s ? seconds(one.decode_step_s) : "–";
  const waits = one.waiting ? `, ${one.waiting} wait` : "";
  return h("tr", {},
    h("th", { scope: "row", title: one.id }, one.address, h("span", { class: "quiet" }, ` ${one.host}`)),
    h("td", {}, one.role), h("td", {}, stated(one.state)), h("td", {}, one.model),
    h("td", {}, numbered([[one.queue_s / BUSY_S, "queue"]], `Queue: ${seconds(one.queue_s)}`, seconds(one.queue_s))),
    h("td", {}, numbered([[one.running / one.max_running, "batch"]], `Batch: ${one.running} of ${one.max_running}`, `${one.running} of ${one.max_running}${waits}`)),
    h("td", {}, numbered([[one.kv_usage, "kv"]], `KV memory: ${share(one.kv_usage)}`, `${share(one.kv_usage)} of ${count(one.kv_capacity_tokens)} tok`)),
    h("td", { class: "end" }, one.prefill_tokens_per_s ? `${count(one.prefill_tokens_per_s)} tok/s` : "–"),
    h("td", { class: "end" }, step),
    h("td", { class: "end" }, share(one.hit_rates && 1 - one.hit_rates.computed)),
    h("td", { class: "end" }, share(one.acceptance)));
}

function tierRows(store) {
  const tiers = store.tiers.length ? store.tiers : [{ tier: "–", blocks: 0, used_bytes: 0, bytes: 0, given_blocks: 0, evictions: 0 }];
  return tiers.map((tier, at) => ({ id: store.id, address: store.address, host: store.host, state: store.state, hits: at ? "" : share(store.hit_rate), tier }));
}

function tierRow({ address, host, state, hits, tier }) {
  const part = tier.bytes ? tier.used_bytes / tier.bytes : 0;
  return h("tr", {},
    h("th", { scope: "row" }, address, h("span", { class: "quiet" }, ` ${host}`)),
    h("td", {}, stated(state)), h("td", {}, tier.tier),
    h("td", {}, numbered([[part, tier.tier]], `${tier.tier}: ${share(part)} filled`, tier.bytes ? share(part) : "no place of its own")),
    h("td", { class: "end" }, tier.bytes ? `${bytes(tier.used_bytes)} of ${bytes(tier.bytes)}` : bytes(tier.used_bytes)),
    h("td", { class: "end" }, count(tier.blocks)), h("td", { class: "end" }, count(tier.given_blocks)),
    h("td", { class: "end" }, count(tier.evictions)), h("td", { class: "end" }, hits));
}
