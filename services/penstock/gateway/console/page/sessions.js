// Sessions: where they are, and what of them is cached.

import { bar, h, keyed, table } from "./dom.js";
import { ago, count, share } from "./format.js";

export function sessionsView() {
  const known = h("p", { class: "quiet", role: "status" });
  const none = h("p", { class: "empty", hidden: true });
  const entry = h("input", { id: "filter", type: "search", placeholder: "tenant, model or digest", oninput: () => shown(), autocomplete: "off" });
  const list = table("Sessions", [["Session"], ["Tenant"], ["Model"], ["Last at"], ["Cached now", "wide"], ["Prompt", "end"], ["Answer", "end"], ["Requests", "end"], ["Last request", "end"]]);
  let found = { sessions: [], known: 0 };

  function shown() {
    const wanted = entry.value.trim().toLowerCase();
    const those = found.sessions.filter((one) => `${one.tenant} ${one.model} ${one.session}`.toLowerCase().includes(wanted));
    keyed(list.body, those.map((one) => ({ ...one, age_s: Math.round(one.age_s) })), (one) => `${one.model} ${one.session}`, row);
    const told = `${those.length} of ${count(found.known)} that the routers remember`;
    if (known.textContent !== told) known.textContent = told;
    none.hidden = those.length > 0;
    list.element.hidden = those.length === 0;
    none.textContent = found.sessions.length ? "No session is like that." : "No session had a request yet. A request with the header x-session-affinity begins one.";
  }

  return {
    element: h("div", { class: "view" },
      h("div", { class: "top" }, h("h1", {}, "Sessions"), known, h("label", { class: "filter", for: "filter" }, "Show only", entry)),
      h("p", { class: "quiet" }, "The mesh does not know the names that clients give their sessions, only digests of them."),
      h("section", { class: "panel" }, list.element, none)),
    title: "Sessions",
    path: "sessions",
    everyMs: 2000,
    take(said) {
      found = said;
      shown();
    },
  };
}

function row(one) {
  const part = one.prompt_tokens ? one.cached_tokens / one.prompt_tokens : 0;
  const where = one.prefill === one.decode || !one.prefill ? one.decode : `${one.prefill} → ${one.decode}`;
  const told = `${count(one.cached_tokens)} of ${count(one.prompt_tokens)} tokens`;
  return h("tr", {},
    h("th", { scope: "row", class: "mono", title: one.session }, one.session.slice(0, 12)),
    h("td", {}, one.tenant || "–"), h("td", {}, one.model), h("td", { class: "mono" }, where),
    h("td", {}, h("span", { class: "measured" }, bar([[part, "cached"]], `Cached now: ${told}`), h("span", {}, share(part)))),
    h("td", { class: "end" }, `${count(one.prompt_tokens)} tok`), h("td", { class: "end" }, one.answer_tokens ? `${count(one.answer_tokens)} tok` : "–"),
    h("td", { class: "end" }, count(one.requests)), h("td", { class: "end" }, `${ago(one.age_s)} ago`));
}
