// Which view is shown, when it asks for news, and the operator's key.

import { Refused, ask, hasKey, useKey } from "./api.js";
import { h } from "./dom.js";
import { meshView } from "./mesh.js";
import { playgroundView } from "./playground.js";
import { requestView, requestsView } from "./requests.js";
import { sessionsView } from "./sessions.js";

const main = document.getElementById("view");
const state = document.getElementById("state");
const leave = document.getElementById("leave");
const VIEWS = { mesh: meshView, sessions: sessionsView, requests: requestsView, playground: playgroundView };

let shown = null; // {element, title, path, everyMs, take, close}
let timer = 0;
let asking = null;

function opened() {
  const [name, id] = location.hash.replace(/^#\/?/, "").split("/");
  if (name === "requests" && id) return requestView(decodeURIComponent(id));
  return (VIEWS[name] ?? meshView)();
}

function show() {
  if (location.hash && !location.hash.startsWith("#/")) return; // a place in the page
  shown?.close?.();
  const moved = shown !== null;
  shown = opened();
  document.title = `${shown.title} · Penstock console`;
  const here = `#/${location.hash.replace(/^#\/?/, "").split("/")[0] || "mesh"}`;
  for (const link of document.querySelectorAll("#views a")) {
    if (link.getAttribute("href") === here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  main.replaceChildren(shown.element);
  if (moved) main.focus({ preventScroll: true });
  scrollTo(0, 0);
  look();
}

// A view asks again only when its last question is answered, and nobody asks while the page is out of sight.
async function look() {
  clearTimeout(timer);
  asking?.abort();
  const view = shown;
  if (document.hidden || !view.path) return;
  const call = (asking = new AbortController());
  try {
    const found = await ask(view.path, call.signal);
    if (shown !== view) return;
    view.take(found);
    say("");
  } catch (error) {
    if (call.signal.aborted || shown !== view) return;
    if (error instanceof Refused && [401, 403].includes(error.status)) {
      signIn(error);
      return;
    }
    if (error instanceof Refused && error.status === 404) {
      main.replaceChildren(h("h1", {}, view.title), h("p", { class: "empty" }, error.message), h("a", { href: "#/requests" }, "← All requests"));
      return;
    }
    say(error instanceof Refused ? error.message : "the gateway does not answer; trying again");
  }
  if (view.everyMs) timer = setTimeout(look, view.everyMs);
}

function say(problem) {
  leave.hidden = !hasKey();
  if (state.textContent !== problem) state.textContent = problem;
}

function signIn(error) {
  const needed = error.status === 401;
  const entry = h("input", { id: "key", type: "password", autocomplete: "off", required: true, spellcheck: "false" });
  const foreign = error.status === 403 && !hasKey();
  const form = h("form", { class: "sign-in", onsubmit: (event) => {
    event.preventDefault();
    useKey(entry.value.trim());
    show();
  } },
    h("h1", {}, "Operator's key"),
    h("p", {}, needed && !hasKey() ? "The console wants the key of an operator. `penstock keys add NAME --operator` makes one." : error.message),
    ...(foreign ? [] : [
      h("label", { for: "key" }, "Key"), entry,
      h("button", { type: "submit" }, "Open the console"),
      h("p", { class: "quiet" }, "It stays in this tab until the tab is closed, and is sent in a header to this gateway alone."),
    ]));
  say("");
  main.replaceChildren(form);
  entry.focus();
}

leave.addEventListener("click", () => {
  useKey("");
  show();
});
addEventListener("hashchange", show);
document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  if (!main.querySelector(".sign-in")) look(); // who types a key is not disturbed
});
show();
