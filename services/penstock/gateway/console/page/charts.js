// Lines over the last minutes.

import { h } from "./dom.js";
import uPlot from "./uPlot.esm.js";

const HEIGHT = 150;
const dark = matchMedia("(prefers-color-scheme: dark)");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** A chart of named lines, each [name, colour]; `written` makes a value readable, and the axis goes up to `least` or more. */
export class Chart {
  constructor(title, unit, written, least) {
    this.written = written;
    this.least = least;
    this.lines = "";
    this.legend = h("ul", { class: "legend" });
    this.canvas = h("div", { class: "canvas", role: "img", "aria-label": title });
    this.element = h("section", { class: "chart" },
      h("div", { class: "top" }, h("h2", {}, title, h("span", { class: "unit" }, unit)), this.legend), this.canvas);
    this.sizes = new ResizeObserver(() => this.plot?.setSize({ width: this.canvas.clientWidth, height: HEIGHT }));
    this.sizes.observe(this.canvas);
    this.scheme = () => (this.lines = "");
    dark.addEventListener("change", this.scheme);
  }

  show(lines, data) {
    const said = JSON.stringify(lines);
    if (said !== this.lines) this.#open(lines, said);
    this.plot.setData(data);
    this.legend.replaceChildren(...lines.map(([name, tint], at) => h("li", { class: tint }, name,
      h("b", {}, this.written(data[at + 1].at(-1) ?? 0)))));
  }

  close() {
    this.sizes.disconnect();
    dark.removeEventListener("change", this.scheme);
    this.plot?.destroy();
  }

  #open(lines, said) {
    this.plot?.destroy();
    this.lines = said;
    const ink = { stroke: colour("muted"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    this.plot = new uPlot({
      width: Math.max(200, this.canvas.clientWidth),
      height: HEIGHT,
      legend: { show: false },
      cursor: { y: false, points: { size: 6 } },
      scales: { x: { time: true }, y: { range: (_, low, high) => [0, Math.max(high || 0, this.least) * 1.1] } },
      axes: [{ ...ink, size: 26, values: (_, at) => at.map((x) => new Date(x * 1000).toLocaleTimeString([], { hourCycle: "h23" })), space: 90 },
        { ...ink, size: 54, values: (_, at) => at.map(this.written) }],
      series: [{}, ...lines.map(([label, tint]) => ({ label, stroke: colour(tint), width: 1.6, points: { show: false } }))],
    }, [[], ...lines.map(() => [])], this.canvas);
  }
}
