// Makes elements. Text is always text: nothing here reads markup.

const SVG = "http://www.w3.org/2000/svg";

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, said] of Object.entries(value)) element.style.setProperty(key, said);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** An element of HTML. */
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** An element of SVG. */
export function s(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** Makes `parent` hold one element per item, in order. An element stays as long as its item says the same: whoever has the
 * focus keeps it. */
export function keyed(parent, items, key, made) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const wanted = items.map((item) => {
    const said = JSON.stringify(item);
    const old = known.get(key(item));
    if (old && old.dataset.said === said) return old;
    const fresh = made(item);
    fresh.dataset.key = key(item);
    fresh.dataset.said = said;
    return fresh;
  });
  const kept = new Set(wanted);
  for (const child of [...parent.children]) if (!kept.has(child)) child.remove();
  wanted.forEach((child, at) => {
    if (parent.children[at] !== child) parent.insertBefore(child, parent.children[at] ?? null);
  });
}

/** A share of something, 0 to 1, as a bar. */
export function bar(parts, label) {
  return h(
    "span",
    { class: "bar", role: "img", "aria-label": label, title: label },
    parts.map(([share, kind]) =>
      h("span", { class: `part ${kind}`, style: { width: `${(100 * Math.max(0, Math.min(1, share || 0))).toFixed(2)}%` } }),
    ),
  );
}

/** A table whose columns are [title, class]; `body` is its tbody. It scrolls by itself where the window is narrow. */
export function table(label, columns) {
  const body = h("tbody");
  const head = h("tr", {}, columns.map(([title, kind]) => h("th", { scope: "col", class: kind }, title)));
  const element = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    h("table", {}, h("thead", {}, head), body));
  return { element, body };
}

/** A figure with its name and unit. */
export function tile(name, value, unit = "", note = "") {
  return h("div", { class: "tile" }, h("dt", {}, name),
    h("dd", {}, h("span", { class: "number" }, value), unit && h("span", { class: "unit" }, unit)),
    h("dd", { class: "note" }, note));
}
