// What the case files of Node share: each case is an async function that throws when the client does not work.
import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";

export const URL_ = process.env.PENSTOCK_URL;
export const MODEL = process.env.PENSTOCK_MODEL;
export const KEY = "none";
export const CITIES = ["Oslo", "Bergen"]; // a list, since a small model fills an open string to the limit
export const WEATHER = "What is the weather in Oslo?";
export const HISTORY = `Conversation ${randomUUID()}. ` + "It rained in Oslo, and the harbour was quiet. ".repeat(20);
export const SESSION = { "x-session-affinity": randomUUID() };
export const ENDLESS = { ignore_eos: true }; // of a body of Chat Completions: the answer goes on for very long
export const ENDLESS_SCHEMA = {
  type: "object", properties: { text: { type: "string", minLength: 7000 } }, required: ["text"], additionalProperties: false,
};
const LIMIT_MS = 120_000;
const GONE_MS = 1000;

export function version(name) {
  return JSON.parse(readFileSync(new URL(`../node_modules/${name}/package.json`, import.meta.url))).version;
}

export function check(holds, what) {
  if (!holds) throw new Error(what);
}

// In `leave` the client begins a request and leaves it. Then the gateway runs none, and says that it was cancelled.
export async function leaving(leave) {
  const before = (await figures())[1];
  await leave();
  const late = performance.now() + GONE_MS;
  for (;;) {
    const [live, cancelled] = await figures();
    if (live === 0 && cancelled === before + 1) return;
    const said = `${GONE_MS} ms later ${live} requests are live and ${cancelled - before} of 1 cancelled`;
    check(performance.now() < late, said);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}

// Settles when a request is live.
export async function begun() {
  while (!(await figures())[0]) await new Promise((resolve) => setTimeout(resolve, 20));
}

async function figures() {
  const page = await (await fetch(`${URL_}/metrics`)).text();
  const names = ["penstock_requests_live ", 'penstock_requests_total{outcome="cancelled"} '];
  return names.map((name) => {
    const line = page.split("\n").find((line) => line.startsWith(name));
    return line ? Number(line.slice(name.length)) : 0;
  });
}

export async function report(versions, cases) {
  const found = {};
  for (const [name, run] of Object.entries(cases)) {
    let timer;
    const late = new Promise((_, reject) => (timer = setTimeout(() => reject(new Error("took too long")), LIMIT_MS)));
    try {
      await Promise.race([run(), late]);
      found[name] = "ok";
    } catch (error) {
      found[name] = `${error?.name}: ${String(error?.message).slice(0, 400)}`;
    } finally {
      clearTimeout(timer);
    }
  }
  console.log(JSON.stringify({ versions, cases: found }));
  process.exit(0);
}
