// What `penstock ctl explain` knows of a request: where its time went, where its KV came from, what there was to choose.

import { bar, h, table, tile } from "./dom.js";
import { clock, count, seconds, share } from "./format.js";
import { sourceBar, sourceLegend } from "./sources.js";

// The parts of a request's time in order; those up to prefill end with the first token.
const PARTS = [
  ["body", "body", "the body arrives and is read", "work"],
  ["tokenize", "tokenize", "chat template and tokenizer", "work"],
  ["plan", "plan", "until its workers were chosen", "wait"],
  ["call", "call", "the way to the worker and back", "move"],
  ["queue", "queue", "a place in the worker's batch", "wait"],
  ["fetch", "fetch", "KV from the store", "move"],
  ["prefill", "prefill", "the prompt is computed", "work"],
  ["handoff", "hand-off", "until decode's first token", "move"],
  ["decode", "decode", "until the last token", "work"],
  ["send", "send", "until the answer is written", "move"],
];
const KINDS = [["work", "works"], ["wait", "waits"], ["move", "moves data"], ["lost", "lost"]];
const COSTS = ["queue", "ahead", "compute", "fetch", "pull", "penalty", "handoff", "room", "decode"];
const TOKENS = [["resident", "worker's pages"], ["store", "store"], ["awaited", "awaited"], ["remote", "other hosts"], ["uncached", "to compute"]];

export function explained({ request, plans, members }) {
  const head = [h("div", { class: "top" }, h("h1", {}, "Request ", h("span", { class: "mono" }, request.request_id)),
    h("span", { class: `badge ${request.status}` }, request.status), h("p", { class: "quiet" }, `${clock(request.created)}, tenant ${request.tenant}`))];
  if (request.error) head.push(h("p", { class: "problem" }, `${request.error.message} (${request.error.code ?? request.error.type})`));
  if (request.status === "refused") return head;
  const at = (id) => members[id] ?? id;
  return [...head, tilesOf(request),
    h("section", { class: "panel" }, ...waterfall(request)),
    h("section", { class: "panel" }, h("div", { class: "top" }, h("h2", {}, "Where the prompt's KV came from"), sourceLegend()), h("div", { class: "broad" }, sourceBar(request.tokens))),
    ...request.choices.flatMap((choice) => choice.attempts.map((attempt, number) =>
      planOf(attempt, plans[attempt.plan], at, request.choices.length > 1 ? `Choice ${choice.index}, plan ${number + 1}` : `Plan ${number + 1}`)))];
}

function tilesOf({ tokens, times, replans, model }) {
  const cached = Object.values(tokens.cached).reduce((sum, one) => sum + one, 0);
  const pace = times.decode > 0 && tokens.completion > 1 ? (tokens.completion - 1) / times.decode : null;
  return h("dl", { class: "tiles" },
    tile("First token", ...seconds(times.first_token).split(" "), model),
    tile("Total", ...seconds(times.total).split(" "), pace ? `${count(pace)} tok/s while decoding` : ""),
    tile("Prompt", count(tokens.prompt), "tokens", `${count(cached)} cached, ${count(tokens.computed)} computed`),
    tile("Answer", count(tokens.completion), "tokens", tokens.reasoning ? `${count(tokens.reasoning)} of reasoning` : ""),
    tile("Drafts accepted", share(tokens.drafted ? tokens.accepted / tokens.drafted : null), "", `${count(tokens.accepted)} of ${count(tokens.drafted)}`),
    tile("Moves", count(replans), "", replans ? "to other workers" : "never moved"));
}

function waterfall(request) {
  const { times } = request;
  const rows = h("ol", { class: "waterfall" });
  const chosen = (name, text, on) => h("label", {}, h("input", { type: "radio", name: "span", checked: on, onchange: () => draw(name) }), text);
  const first = times.first_token;
  const draw = (span) => {
    const most = (span === "first" ? first : times.total) || 1e-9;
    rows.replaceChildren(axis(most, first), ...bars(request, most, span === "first"));
  };
  draw("whole");
  return [h("div", { class: "top" }, h("h2", {}, "Where the time went"),
    h("fieldset", { class: "choices" }, h("legend", { class: "unseen" }, "Span"), chosen("whole", "whole request", true), chosen("first", "until the first token", false)),
    h("ul", { class: "legend" }, KINDS.map(([kind, text]) => h("li", { class: kind }, text)))), rows];
}

function axis(most, first) {
  const marks = [0, 0.25, 0.5, 0.75, 1].map((part) => h("span", { class: "tick", style: { left: `${part * 100}%` } }, seconds(part * most)));
  const line = first < most * 0.9995 ? [h("span", { class: "first", style: { left: `${(100 * first) / most}%` } }, "first token")] : [];
  return h("li", { class: "axis" }, h("span"), h("span", { class: "lane" }, marks, line), h("span"));
}

function bars(request, most, until) {
  const { times } = request;
  const found = [];
  let begin = 0;
  for (const [name, title, what, kind] of PARTS) {
    const took = times[name];
    if (!(until && ["handoff", "decode", "send"].includes(name))) {
      const held = name === "plan" ? heldBack(request) : 0;
      found.push(span(title, held ? `${what}; held back in the router's line for ${seconds(held)}` : what, kind, begin, took, most));
    }
    begin += took;
  }
  for (const choice of request.choices) for (const [number, attempt] of choice.attempts.entries()) {
    const { lost } = attempt;
    if (lost && lost.at <= most) found.push(span(`plan ${number + 1} lost`, `in ${lost.stage}: ${lost.message}`, "lost", attempt.at, lost.at - attempt.at, most));
  }
  return found;
}

const heldBack = (request) => (request.choices[0]?.attempts ?? []).reduce((sum, one) => sum + (one.reasons?.held_s ?? 0), 0);

function span(title, what, kind, begin, took, most) {
  const left = Math.min(99.6, (100 * begin) / most);
  return h("li", {},
    h("span", { class: "part-name" }, title, h("span", { class: "quiet" }, what)),
    h("span", { class: "lane" }, h("span", { class: `span ${kind}`, style: { left: `${left}%`, width: `${Math.max(0.3, Math.min(100 - left, (100 * took) / most))}%` } })),
    h("span", { class: "end" }, seconds(took)));
}

function planOf(attempt, plan, at, title) {
  const { prefill, decode, lost, reasons } = attempt;
  const where = prefill ? `prompt at ${at(prefill.worker)}, answer at ${at(decode.worker)}` : `prompt and answer at ${at(decode.worker)}`;
  const parts = [h("div", { class: "top" }, h("h2", {}, title), h("p", { class: "quiet" }, `after ${seconds(attempt.at)}: ${where}`))];
  if (lost) parts.push(h("p", { class: "problem" }, `Lost after ${seconds(lost.at)} in ${lost.stage}: ${lost.message}${lost.silent ? " The router hears nothing of that worker either." : ""}`));
  if (plan) {
    parts.push(options(plan, at, title));
    const left = plan.looked_at - plan.options.length;
    const from = plan.sources.length ? ` KV was to come from the stores at ${plan.sources.join(", ")}.` : "";
    parts.push(h("p", { class: "quiet" }, `${left > 0 ? `${left} dearer options are left out. ` : ""}${plan.choices} decode worker${plan.choices === 1 ? "" : "s"} could have taken it.${from}`));
  } else if (reasons) {
    parts.push(h("p", { class: "quiet" }, `Expected ${seconds(reasons.first_token_s)} to the first token and ${seconds(reasons.answer_s)} in all; the router does not remember the other options.`));
  }
  return h("section", { class: "panel" }, parts);
}

function options(plan, at, title) {
  const costs = COSTS.filter((name) => plan.options.some((one) => one[`${name}_s`] > 0));
  const tokens = TOKENS.filter(([name]) => plan.options.some((one) => one[`${name}_tokens`] > 0));
  const most = Math.max(1e-9, ...plan.options.map((one) => one.total_s));
  const list = table(`${title}: options`, [["Option"], ["Prompt at"], ["Answer at"], ["Predicted", "wide"], ["Sum", "end"],
    ...costs.map((name) => [name, "end"]), ["Others lose", "end"], ...tokens.map(([, text]) => [text, "end"])]);
  list.body.append(...plan.options.map((one, number) => h("tr", { class: number ? "" : "chosen" },
    h("th", { scope: "row" }, number ? `${number + 1}` : "chosen"),
    h("td", { class: "mono" }, at(one.prefill || one.decode)), h("td", { class: "mono" }, at(one.decode)),
    h("td", {}, bar(costs.map((name) => [one[`${name}_s`] / most, `cost-${name}`]), costs.map((name) => `${name} ${seconds(one[`${name}_s`])}`).join(", "))),
    h("td", { class: "end" }, seconds(one.total_s + one.others_s)),
    ...costs.map((name) => h("td", { class: "end" }, seconds(one[`${name}_s`]))),
    h("td", { class: "end" }, seconds(one.others_s)),
    ...tokens.map(([name]) => h("td", { class: "end" }, count(one[`${name}_tokens`]))))));
  return list.element;
}
