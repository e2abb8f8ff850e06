// The mesh as a picture: a lane for each role, and between them what flows.

import { s } from "./dom.js";
import { bytes, counted, rate, seconds, share, short } from "./format.js";

const WIDE = 760; // px, from which lanes are columns
const MOST = 6; // nodes of a lane that are drawn
const HEIGHT = { plain: 46, worker: 66 };
const GAP = 14;
const TOP = 62;
const SLIM = 190; // px, below which a node says less

/** Draws into `svg`, for its width on the page. */
export function draw(svg, frame, rates) {
  const width = Math.max(300, Math.floor(svg.parentNode.clientWidth));
  const lanes = lanesOf(frame, rates);
  const place = width >= WIDE ? columns(lanes, width) : rows(lanes, width);
  svg.setAttribute("viewBox", `0 0 ${width} ${place.height}`);
  svg.setAttribute("height", place.height);
  svg.setAttribute("aria-label", spoken(lanes, rates));
  svg.replaceChildren(
    ...edges(lanes, rates, width >= WIDE).map((edge) => flow(edge)),
    ...place.titles.map(([x, y, text]) => s("text", { class: "lane", x, y }, text)),
    ...Object.values(lanes).flatMap((lane) => lane.nodes.map(node)),
  );
}

function lanesOf(frame, rates) {
  const byRole = (role) => frame.workers.filter((one) => (one.role === "prefill") === (role === "prefill"));
  const worker = (one) => ({ kind: "worker", height: HEIGHT.worker, id: one.id, host: one.host, state: one.state,
    title: one.role === "both" ? "both" : one.role, note: one.address,
    text: [seconds(one.queue_s), `${one.running}/${one.max_running}`],
    bars: [["queue", one.queue_s / 2], ["kv", one.kv_usage]], rates: rates.workers.get(one.id) });
  const store = (one) => ({ kind: "store", height: 34 + 18 * Math.max(1, one.tiers.length), id: one.id, host: one.host,
    state: one.state, title: "store", note: one.address, tiers: one.tiers });
  const total = rates.total;
  const accepted = total.drafted ? `, ${share(total.accepted / total.drafted)} accepted` : "";
  const drafts = { id: "drafts", state: frame.total.drafted_tokens ? "ready" : "none", title: "drafts",
    note: total.drafted ? `${rate(total.drafted)} tok/s${accepted}` : frame.total.drafted_tokens ? "resting" : "none so far" };
  const service = (one) => ({ id: one.id, state: "ready", title: "draft service", note: `${counted(one.sequences, "sequence")}, ${one.address}` });
  return {
    gateway: lane("Gateways", frame.gateways, (one) => ({ kind: "plain", height: HEIGHT.plain, id: one.address,
      state: "ready", title: "gateway", note: one.http_address })),
    router: lane("Router", [frame], (one) => ({ kind: "plain", height: HEIGHT.plain, id: "router", state: "ready",
      title: "router", note: `${counted(one.requests, "request")}, ${one.held} held` })),
    prefill: lane("Prefill", byRole("prefill"), worker),
    decode: lane("Decode", byRole("decode"), worker),
    store: lane("Stores", frame.stores, store),
    draft: { ...lane("Drafts", [frame, ...frame.drafts], (one, at) => ({ kind: "plain", height: HEIGHT.plain, ...(at ? service(one) : drafts) })),
      count: frame.drafts.length },
  };
}

function lane(title, members, made) {
  const more = members.length - MOST;
  const nodes = members.slice(0, more > 0 ? MOST - 1 : MOST).map(made);
  if (more > 0) nodes.push({ kind: "plain", height: 30, id: `${title} more`, state: "more", title: `+ ${more + 1} more`, note: "" });
  return { title, count: members.length, nodes };
}

function stack(nodes, x, y, width) {
  for (const one of nodes) {
    Object.assign(one, { x, y, width });
    y += one.height + GAP;
  }
  return y;
}

function columns(lanes, width) {
  const order = ["gateway", "router", "prefill", "decode"];
  const gap = Math.min(110, width / 14);
  const cell = Math.min(270, (width - 2 - 3 * gap) / 4);
  const step = (width - 2 - cell) / 3;
  const at = (column) => 1 + column * step;
  const titles = order.map((name, column) => [at(column), TOP - 14, titled(lanes[name])]);
  const ends = order.map((name, column) => stack(lanes[name].nodes, at(column), TOP, cell));
  const below = Math.max(TOP + HEIGHT.worker + GAP, ...ends) + 44;
  titles.push([at(1), below - 14, titled(lanes.store)], [at(3), below - 14, titled(lanes.draft)]);
  const height = Math.max(stack(lanes.store.nodes, at(1), below, step + cell), stack(lanes.draft.nodes, at(3), below, cell));
  return { titles, height: Math.ceil(height - GAP + 2) };
}

function rows(lanes, width) {
  const titles = [];
  let y = 0;
  const across = (names) => {
    const cell = (width - 2 - 24 * (names.length - 1)) / names.length;
    const ends = names.map((name, at) => {
      const x = 1 + at * (cell + 24);
      titles.push([x, y + 16, titled(lanes[name])]);
      return stack(lanes[name].nodes, x, y + 26, cell);
    });
    y = Math.max(...ends, y + 60) + 26;
  };
  across(["gateway", "router"]);
  across(["prefill", "decode"]);
  across(["store", "draft"]);
  return { titles, height: Math.ceil(y - 26) };
}

const titled = (lane) => (lane.count > 1 ? `${lane.title} · ${lane.count}` : lane.title);

function node(one) {
  const fit = Math.max(6, Math.floor((one.width - 24) / 6.6));
  const inner = one.width - 24;
  const group = s("g", { class: `node ${one.kind} ${one.state}`, transform: `translate(${one.x} ${one.y})` },
    s("title", {}, `${one.title} ${one.note}`),
    s("rect", { class: "box", width: one.width, height: one.height, rx: 8 }));
  const named = s("text", { x: 12, y: 19, class: "name" }, one.title);
  if (one.state !== "ready" && one.state !== "more" && one.state !== "none") named.append(s("tspan", { class: "state", dx: 6 }, one.state));
  group.append(named);
  if (one.kind === "plain") {
    if (one.note) group.append(s("text", { x: 12, y: 36, class: "note" }, short(one.note, fit)));
    return group;
  }
  const note = one.width < SLIM ? `:${one.note.split(":").at(-1)}` : one.note;
  const said = one.title.length + (one.state === "ready" ? 0 : one.state.length + 2);
  group.append(s("text", { x: one.width - 12, y: 19, class: "note end" }, short(note, Math.max(6, fit - Math.ceil(1.3 * said)))));
  if (one.kind === "worker") {
    const [queue, batch] = one.text;
    group.append(s("text", { x: 12, y: 36, class: "note" }, one.width < SLIM ? `${queue} · ${batch}` : `${queue} queue · ${batch} in batch`));
    one.bars.forEach(([kind, part], at) => group.append(...meter(12, 45 + 8 * at, inner, part, kind)));
  } else {
    one.tiers.forEach((tier, at) => {
      const y = 40 + 18 * at;
      const part = tier.bytes ? tier.used_bytes / tier.bytes : 0;
      const full = tier.bytes ? `${bytes(tier.used_bytes)} of ${bytes(tier.bytes)}` : bytes(tier.used_bytes);
      const size = one.width < SLIM && tier.bytes ? share(part) : full;
      group.append(s("text", { x: 12, y, class: "note" }, tier.tier),
        ...meter(56, y - 7, Math.max(10, inner - 54 - 6.6 * size.length), part, tier.tier),
        s("text", { x: one.width - 12, y, class: "note end" }, size));
    });
    if (!one.tiers.length) group.append(s("text", { x: 12, y: 36, class: "note" }, "no report yet"));
  }
  return group;
}

function meter(x, y, width, part, kind) {
  const filled = Math.max(0, Math.min(1, part || 0)) * width;
  return [s("rect", { class: "track", x, y, width, height: 4, rx: 2 }),
    s("rect", { class: `fill ${kind}`, x, y, width: filled.toFixed(1), height: 4, rx: 2 })];
}

// Each edge: from a node to a node, what flows there in tokens per second, and the path's bend.
function edges(lanes, { total, workers }, wide) {
  const found = [];
  const between = (from, to, kind, flows, way) => {
    for (const one of from) for (const other of to) found.push({ from: one, to: other, kind, rate: flows(one, other), way });
  };
  const of = (one, name) => workers.get(one.id)?.[name] ?? 0;
  const { gateway, router, prefill, decode, store, draft } = lanes;
  const real = (lane) => lane.nodes.filter((one) => one.state !== "more");
  const gates = real(gateway).slice(0, 1);
  const begun = (one) => of(one, "computed") + of(one, "cached");
  const across = wide ? "across" : "down";
  between(gates, router.nodes, "plan", () => 0, "across");
  between(router.nodes, real(prefill), "plan", () => 0, across);
  if (!prefill.nodes.length) between(router.nodes, real(decode), "plan", () => 0, across);
  const handed = real(decode);
  between(real(prefill), handed, "handoff", (one) => begun(one) / Math.max(1, handed.length), "across");
  between(handed, gates, "tokens", (one) => of(one, "generated"), wide ? "over" : "down");
  for (const one of [...real(prefill), ...handed]) {
    const own = real(store).filter((other) => other.host === one.host);
    between(own, [one], "fetch", () => of(one, "fetched"), wide ? "up" : "rise");
  }
  if (total.drafted || draft.nodes[0].state === "ready") {
    between(draft.nodes.slice(0, 1), handed, "draft", (_, one) => of(one, "drafted"), wide ? "up" : "rise");
  }
  return found;
}

function path({ from, to, way }) {
  const middle = (one) => [one.x + one.width / 2, one.y + one.height / 2];
  const [fx, fy] = middle(from);
  const [tx, ty] = middle(to);
  if (way === "across") {
    const right = tx > fx;
    const [a, b] = right ? [from.x + from.width, to.x] : [from.x, to.x + to.width];
    const bend = (b - a) / 2;
    const [y, z] = [Math.min(fy, from.y + HEIGHT.plain / 2), Math.min(ty, to.y + HEIGHT.plain / 2)];
    return `M${a} ${y}C${a + bend} ${y} ${b - bend} ${z} ${b} ${z}`;
  }
  if (way === "over") {
    const high = 14;
    return `M${fx} ${from.y}C${fx} ${high} ${fx - 40} ${high} ${fx - 90} ${high}L${tx + 90} ${high}C${tx + 40} ${high} ${tx} ${high} ${tx} ${to.y}`;
  }
  const down = way === "down" && ty > fy;
  const [a, b] = down ? [from.y + from.height, to.y] : [from.y, to.y + to.height];
  const x = way === "up" ? Math.max(from.x + 20, Math.min(from.x + from.width - 20, tx)) : fx; // a wide node's edge begins below its end
  const bend = (b - a) / 2;
  return `M${x} ${a}C${x} ${a + bend} ${tx} ${b - bend} ${tx} ${b}`;
}

// The picture is drawn anew each second: what moves goes on from where it would be.
function flow(edge) {
  const d = path(edge);
  const group = s("g", { class: `edge ${edge.kind}` }, s("path", { class: "way", d }));
  if (edge.rate > 0) {
    const level = Math.max(0, Math.min(1, Math.log10(1 + edge.rate) / 4)); // 1 token/s to 10,000
    const takes = Number((2.6 - 2.1 * Math.round(level * 8) / 8).toFixed(3));
    const style = { "animation-duration": `${takes}s`, "animation-delay": `${-((performance.now() / 1000) % takes)}s` };
    group.append(s("path", { class: "flow", d, style, "stroke-width": (2 + 2.4 * level).toFixed(2) },
      s("title", {}, `${edge.kind}: ${rate(edge.rate)} tokens/s`)));
  }
  return group;
}

function spoken(lanes, { total }) {
  const members = Object.values(lanes).filter((one) => one.title !== "Drafts").map((one) => `${one.title.toLowerCase()}: ${one.count}`);
  return `Topology. ${members.join(", ")}. ${rate(total.generated)} tokens generated per second, ${rate(total.computed)} prompt tokens computed, ${rate(total.fetched)} fetched from stores.`;
}
