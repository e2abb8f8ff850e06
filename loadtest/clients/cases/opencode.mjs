// opencode, as `opencode run` starts it: a home and a project of its own, no network but the gateway. Its default agent
// has a longer prompt than a small model can read, so it gets one with a short prompt.
import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { createServer, request } from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";
import { ENDLESS, HISTORY, KEY, MODEL, URL_, begun, check, leaving, report, version } from "./case.mjs";

const OPENCODE = fileURLToPath(new URL("../node_modules/.bin/opencode", import.meta.url));
const home = mkdtempSync(join(tmpdir(), "opencode-"));
const children = [];
process.on("exit", () => {
  children.forEach((child) => child.kill("SIGKILL"));
  rmSync(home, { recursive: true, force: true });
});
writeFileSync(join(home, "note.txt"), "It rained in Oslo.\n");

// The gateway as the client sees it, and what the client says of its session.
const sessions = [];
const between = createServer((asked, answer) => {
  if (asked.url.endsWith("/chat/completions")) sessions.push(asked.headers["x-session-affinity"]);
  const on = request(`${URL_}${asked.url}`, { method: asked.method, headers: asked.headers }, (found) => {
    answer.writeHead(found.statusCode, found.headers);
    found.pipe(answer);
  });
  on.on("error", () => answer.destroy());
  answer.on("close", () => on.destroy());
  asked.pipe(on);
});
await new Promise((resolve) => between.listen(0, "127.0.0.1", resolve));

function config(limit, options) {
  const model = { name: MODEL, limit: { context: 8192, output: limit }, tool_call: true, temperature: true, options };
  return {
    autoupdate: false,
    share: "disabled",
    enabled_providers: ["penstock"],
    model: `penstock/${MODEL}`,
    small_model: `penstock/${MODEL}`,
    provider: {
      penstock: {
        npm: "@ai-sdk/openai-compatible",
        options: { baseURL: `http://127.0.0.1:${between.address().port}/v1`, apiKey: KEY },
        models: { [MODEL]: model },
      },
    },
    agent: {
      brief: { mode: "primary", prompt: "Be brief.", tools: { "*": false } },
      reader: { mode: "primary", prompt: "Be brief.", tools: { "*": false, read: true }, temperature: 0 },
    },
  };
}

// Starts `opencode run`; its events come one a line.
function start(args, { limit = 60, options = {} } = {}) {
  const environment = {
    PATH: process.env.PATH,
    HOME: home,
    OPENCODE_CONFIG_CONTENT: JSON.stringify(config(limit, options)),
    OPENCODE_DISABLE_AUTOUPDATE: "true",
    OPENCODE_DISABLE_DEFAULT_PLUGINS: "true",
    OPENCODE_DISABLE_LSP_DOWNLOAD: "true",
    OPENCODE_DISABLE_MODELS_FETCH: "true",
  };
  const command = ["run", "--format", "json", "--title", "Oslo", ...args];
  const child = spawn(OPENCODE, command, { cwd: home, env: environment, stdio: ["ignore", "pipe", "pipe"] });
  children.push(child);
  return child;
}

// All events of a run; or, with `enough`, those until that is true of them, and then the run is ended.
async function run(args, { enough = () => false, ...more } = {}) {
  const child = start(args, more);
  const events = [];
  let ended = false, err = "";
  child.stderr.on("data", (data) => (err += data));
  for await (const line of createInterface({ input: child.stdout })) {
    if (line && !ended) events.push(JSON.parse(line));
    if (!ended && enough(events)) ended = child.kill();
  }
  const failed = events.find((event) => event.type === "error");
  check(!failed, JSON.stringify(failed?.error));
  if (child.exitCode === null && child.signalCode === null) await once(child, "exit");
  check(ended || child.exitCode === 0, `ended with ${child.exitCode}: ${err.slice(-300)}`);
  return events;
}

const finished = (events) => events.find((event) => event.type === "step_finish").part;

await report({ opencode: version("opencode-ai") }, {
  async chat() {
    const events = await run(["--agent", "brief", "Hello!"]);
    check(events.some((event) => event.type === "text" && event.part.text), "no text");
    check(finished(events).tokens.output > 0, "no usage");
  },
  // A call is required in each step, so the run is ended when the step after the first call has begun.
  async tools() {
    const events = await run(["--agent", "reader", "What does note.txt say?"], {
      limit: 300,
      options: { tool_choice: "required" },
      enough: (events) => events.filter((event) => event.type === "step_start").length === 2,
    });
    check(events.find((event) => event.type === "tool_use")?.part.tool === "read", "the tool was not called");
  },
  async second_turn_is_cached() {
    sessions.length = 0;
    const first = await run(["--agent", "brief", HISTORY]);
    const second = await run(["--agent", "brief", "--session", first[0].sessionID, "And then?"]);
    check(sessions.length === 2 && sessions[0] && sessions[0] === sessions[1], `sessions: ${sessions}`);
    const cached = [first, second].map((events) => finished(events).tokens.cache.read);
    check(cached[1] > cached[0] + 100, `cached: ${cached}`);
  },
  async cancel() {
    await leaving(async () => {
      const child = start(["--agent", "brief", "Hello!"], { limit: 8000, options: ENDLESS });
      const closed = new Promise((resolve) => child.on("close", resolve));
      await begun();
      child.kill("SIGINT");
      await closed;
    });
  },
});
