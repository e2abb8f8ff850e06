// Requests that have ended here: the list, and one of them.

import { h, keyed, table } from "./dom.js";
import { clock, count, seconds } from "./format.js";
import { sourceBar, sourceLegend } from "./sources.js";
import { explained } from "./waterfall.js";

export function requestsView() {
  const list = table("Requests", [["Began"], ["Request"], ["Tenant"], ["Model"], ["Status"], ["Prompt from", "wide"], ["Prompt", "end"], ["Answer", "end"], ["First token", "end"], ["Total", "end"], ["Moves", "end"]]);
  const entry = h("input", { id: "wanted", required: true, autocomplete: "off", spellcheck: "false", placeholder: "x-request-id, or id of a response" });
  const search = h("form", { class: "filter", onsubmit: (event) => {
    event.preventDefault();
    location.hash = `#/requests/${encodeURIComponent(entry.value.trim())}`;
  } }, h("label", { for: "wanted" }, "Open"), entry);
  const none = h("p", { class: "empty", hidden: true }, "No request has ended at this gateway yet.");
  return {
    element: h("div", { class: "view" },
      h("div", { class: "top" }, h("h1", {}, "Requests"), h("p", { class: "quiet" }, "The last that have ended at this gateway; each opens its waterfall."), search),
      h("section", { class: "panel" }, h("div", { class: "top" }, sourceLegend()), list.element, none)),
    title: "Requests",
    path: "requests",
    everyMs: 2000,
    take({ requests }) {
      const seen = new Map(); // a client may use one id again
      keyed(list.body, requests.map((one) => {
        const times = seen.get(one.request_id) ?? 0;
        seen.set(one.request_id, times + 1);
        return { ...one, times_seen: times };
      }), (one) => `${one.request_id} ${one.created} ${one.times_seen}`, row);
      none.hidden = requests.length > 0;
      list.element.hidden = requests.length === 0;
    },
  };
}

function row(one) {
  const { tokens, times } = one;
  const numbers = tokens
    ? [`${count(tokens.prompt)} tok`, `${count(tokens.completion)} tok`, seconds(times.first_token), seconds(times.total), one.replans ? String(one.replans) : "–"]
    : ["–", "–", "–", "–", "–"];
  return h("tr", {},
    h("td", {}, clock(one.created)),
    h("th", { scope: "row", class: "mono" }, h("a", { href: `#/requests/${encodeURIComponent(one.request_id)}` }, one.request_id)),
    h("td", {}, one.tenant), h("td", {}, one.model || "–"),
    h("td", {}, h("span", { class: `badge ${one.status}`, title: one.error?.message }, one.status)),
    h("td", {}, tokens ? sourceBar(tokens) : ""),
    ...numbers.map((text) => h("td", { class: "end" }, text)));
}

/** One request: asked for once, as it has ended. */
export function requestView(id) {
  const element = h("div", { class: "view" }, h("p", { class: "quiet" }, "looking it up …"));
  return {
    element,
    title: `Request ${id}`,
    path: `requests/${encodeURIComponent(id)}`,
    take(found) {
      element.replaceChildren(h("p", { class: "back" }, h("a", { href: "#/requests" }, "← All requests")), ...explained(found));
    },
  };
}
