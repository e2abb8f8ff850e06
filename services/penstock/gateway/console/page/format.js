// Numbers for people.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(count) {
  let at = 0;
  for (; count >= 1024 && at < UNITS.length - 1; at += 1) count /= 1024;
  return `${at && count < 100 ? count.toFixed(1) : Math.round(count)} ${UNITS[at]}`;
}

export function seconds(s) {
  if (s === 0) return "0 s";
  if (s < 0.001) return `${Math.round(s * 1e6)} µs`;
  if (s < 1) return `${(s * 1e3).toFixed(s < 0.1 ? 1 : 0)} ms`;
  if (s < 100) return `${s.toFixed(2)} s`;
  return s < 7200 ? `${Math.round(s / 60)} min` : `${Math.round(s / 3600)} h`;
}

export function count(number) {
  if (number < 10_000) return `${Math.round(number)}`;
  return number < 1e7 ? `${(number / 1e3).toFixed(1)} k` : `${(number / 1e6).toFixed(1)} M`;
}

export function rate(perSecond) {
  return perSecond > 0 && perSecond < 10 ? perSecond.toFixed(1) : count(perSecond);
}

export function share(part) {
  return part === null || part === undefined || Number.isNaN(part) ? "–" : `${Math.round(100 * part)} %`;
}

export function clock(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString([], { hourCycle: "h23" });
}

export function ago(s) {
  return s < 100 ? `${Math.round(s)} s` : seconds(s);
}

/** "1 worker", "2 workers". */
export function counted(number, what) {
  return `${count(number)} ${what}${number === 1 ? "" : "s"}`;
}

export function short(text, most = 14) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}
