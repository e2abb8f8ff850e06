// What the case files of Node share: each case is an async function that throws when the client does not work.
export const URL_ = process.env.PENSTOCK_URL;
export const MODEL = process.env.PENSTOCK_MODEL;
export const KEY = "none";
export const WEATHER = "What is the weather in Oslo?";
const LIMIT_MS = 120_000;

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
