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
const LIMIT_MS = 120_000;

export function version(name) {
  return JSON.parse(readFileSync(new URL(`../node_modules/${name}/package.json`, import.meta.url))).version;
}

export function check(holds, what) {
  if (!holds) throw new Error(what);
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
