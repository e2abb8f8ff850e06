// A chat whose tokens say where they came from: prompt tokens from a cache or computed, answer tokens drafted, forced by a
// grammar, or sampled one by one.

import { answered, bearer, hasKey } from "./api.js";
import { h } from "./dom.js";
import { count, seconds } from "./format.js";
import { events } from "./events.js";
import { TextOfBytes, textsOf } from "./tokens.js";

const PROPOSERS = [["sampled", "sampled, one a step"], ["grammar", "forced by a grammar"], ["lookup", "drafted: lookup"], ["model", "drafted: draft model"], ["head", "drafted: draft head"]];
const PROMPT = [["cached", "prompt: KV from a cache"], ["computed", "prompt: computed"]];
const SCHEMA = { type: "object", properties: { city: { type: "string", maxLength: 12 }, days: { type: "integer", minimum: 1, maximum: 14 }, season: { enum: ["spring", "autumn"] } }, required: ["city", "days", "season"], additionalProperties: false };
const FORMATS = { text: null, json: { type: "json_schema", json_schema: { name: "trip", strict: true, schema: SCHEMA } } };

// Not randomUUID: a page that comes without TLS from another host has none.
const named = () => [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
const talk = { messages: [], turns: [], session: named(), key: "", settings: {} }; // as long as the page

export function playgroundView() {
  const models = h("select", { id: "model" });
  const key = h("input", { id: "client-key", type: "password", autocomplete: "off", value: talk.key, oninput: () => (talk.key = key.value.trim()), onchange: () => listModels() });
  const most = h("input", { id: "most", type: "number", min: "1", max: "4096", value: "128" });
  const warmth = h("input", { id: "warmth", type: "number", min: "0", max: "2", step: "0.1", value: "0" });
  const format = h("select", { id: "format" }, h("option", { value: "text" }, "any text"), h("option", { value: "json" }, "JSON: city, days, season"));
  const drafts = h("input", { id: "drafts", type: "checkbox", checked: true });
  const log = h("div", { class: "talk", role: "log", "aria-label": "Conversation", tabindex: "0" }, talk.turns);
  const words = h("textarea", { id: "words", rows: "3", required: true, onkeydown: (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  } });
  const send = h("button", { type: "submit" }, "Send");
  const stop = h("button", { type: "button", hidden: true, onclick: () => running?.abort() }, "Stop");
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  let running = null;

  const field = (id, text, input) => h("label", { for: id }, text, input);
  const form = h("form", { class: "say", onsubmit: (event) => {
    event.preventDefault();
    if (!running && words.value.trim()) said(words.value.trim());
  } }, h("label", { class: "unseen", for: "words" }, "Your message"), words, h("div", { class: "buttons" }, send, stop,
    h("button", { type: "button", onclick: () => clear() }, "New conversation"), h("span", { class: "quiet" }, "Enter sends, Shift+Enter begins a line")));

  const element = h("div", { class: "view playground" },
    h("div", { class: "top" }, h("h1", {}, "Playground"), h("ul", { class: "legend tokens" }, [...PROMPT, ...PROPOSERS].map(([kind, text]) => h("li", {}, h("span", { class: `t ${kind}` }, "token"), text)))),
    h("div", { class: "columns" },
      h("section", { class: "panel", "aria-label": "Chat" }, log, problem, form),
      h("section", { class: "panel settings", "aria-label": "Settings" }, h("h2", {}, "Settings"),
        ...(hasKey() ? [field("client-key", "Key of a client", key), h("p", { class: "quiet" }, "An operator's key generates nothing. This one is kept until the page is left.")] : []),
        field("model", "Model", models), field("format", "Answer", format), field("most", "Tokens at most", most), field("warmth", "Temperature", warmth),
        h("label", { class: "check", for: "drafts" }, drafts, "Drafts"))));

  async function listModels() {
    try {
      const response = await answered(await fetch("/v1/models", { headers: bearer(talk.key) }));
      const { data } = await response.json();
      models.replaceChildren(...data.map((one) => h("option", { value: one.id }, one.id)));
      fault("");
    } catch (error) {
      fault(hasKey() && !talk.key ? "Give the key of a client to chat." : error.message);
    }
  }

  function fault(text) {
    problem.textContent = text;
    problem.hidden = !text;
  }

  function clear() {
    running?.abort();
    Object.assign(talk, { messages: [], turns: [], session: named() });
    log.replaceChildren();
    words.focus();
  }

  function add(turn) {
    talk.turns.push(turn);
    log.append(turn);
    log.scrollTop = log.scrollHeight;
  }

  async function said(text) {
    const turn = new Turn();
    talk.messages.push({ role: "user", content: text });
    add(h("article", { class: "turn user", "aria-label": "You" }, text));
    add(turn.element);
    words.value = "";
    fault("");
    running = new AbortController();
    [send.disabled, stop.hidden] = [true, false];
    try {
      talk.messages.push(await turn.run(body(), running.signal, () => (log.scrollTop = log.scrollHeight)));
    } catch (error) {
      talk.messages.pop();
      fault(running.signal.aborted ? "Stopped; the turn does not count." : error.message);
    } finally {
      running = null;
      [send.disabled, stop.hidden] = [false, true];
      log.scrollTop = log.scrollHeight;
    }
  }

  function body() {
    return { model: models.value, messages: talk.messages, stream: true, stream_options: { include_usage: true }, logprobs: true,
      max_completion_tokens: Number(most.value), temperature: Number(warmth.value),
      ...(FORMATS[format.value] ? { response_format: FORMATS[format.value] } : {}),
      penstock: { proposers: true, ...(drafts.checked ? {} : { drafts: false }) } };
  }

  listModels();
  return { element, title: "Playground", path: "top", everyMs: 0, take() {}, close: () => running?.abort() };
}

/** The model's turn: its tokens as they come, then what they cost. */
class Turn {
  constructor() {
    this.answer = h("p", { class: "answer" });
    this.cost = h("div", { class: "cost" });
    this.element = h("article", { class: "turn model", "aria-label": "Model" }, this.answer, this.cost);
    this.counts = {};
    this.text = new TextOfBytes();
  }

  async run(body, signal, grown) {
    const headers = { "content-type": "application/json", "x-session-affinity": talk.session, ...bearer(talk.key) };
    const asked = { model: body.model, messages: body.messages, return_token_strs: true };
    const [response, prompt] = await Promise.all([
      fetch("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal }).then(answered),
      fetch("/tokenize", { method: "POST", headers, body: JSON.stringify(asked), signal }).then(answered).then((one) => one.json()),
    ]);
    const message = { role: "assistant", content: "" };
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      for (const choice of chunk.choices) {
        this.#add(choice);
        message.content += choice.delta.content ?? "";
      }
      if (chunk.usage) this.#show(chunk.usage, prompt.token_strs);
      grown();
    }
    return message;
  }

  #add({ logprobs, proposers }) {
    for (const [at, token] of (logprobs?.content ?? []).entries()) {
      const kind = proposers?.[at] ?? "sampled";
      this.counts[kind] = (this.counts[kind] ?? 0) + 1;
      const chance = `${(100 * Math.exp(token.logprob)).toFixed(1)} %`;
      this.answer.append(h("span", { class: `t ${kind}`, title: `${kind}, ${chance} likely` }, this.text.add(token.bytes)));
    }
  }

  #show(usage, names) {
    const own = usage.penstock;
    const tiers = Object.entries(own.cached_tokens).filter(([, tokens]) => tokens).map(([tier, tokens]) => `${count(tokens)} from ${tier}`);
    const cached = usage.prompt_tokens_details.cached_tokens;
    const kinds = PROPOSERS.filter(([kind]) => this.counts[kind]).map(([kind]) => h("li", { class: kind }, `${kind} ${this.counts[kind]}`));
    const facts = [`first token ${seconds(own.times.first_token)}`, `total ${seconds(own.times.total)}`, `${own.accepted_tokens} of ${own.drafted_tokens} drafts accepted`];
    this.cost.replaceChildren(h("ul", { class: "legend" }, kinds), h("p", { class: "quiet" }, facts.join(" · ")),
      h("details", { open: true }, h("summary", {}, `Prompt: ${count(usage.prompt_tokens)} tokens, ${tiers.join(", ") || "none cached"}, ${count(own.computed_tokens)} computed`),
        this.#prompt(names, cached, usage.prompt_tokens)));
  }

  // What is reused of a prompt is its beginning.
  #prompt(names, cached, tokens) {
    if (names.length !== tokens) return h("p", { class: "quiet" }, "The session's own tokens were used, which a tokenizer alone does not give.");
    return h("p", { class: "prompt", tabindex: "0", role: "group", "aria-label": "The prompt's tokens" }, textsOf(names).map((text, at) => h("span", { class: `t ${at < cached ? "cached" : "computed"}` }, text)));
  }
}
