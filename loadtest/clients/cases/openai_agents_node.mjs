// @openai/agents with its defaults: the Responses API, strict tools, an output type.
import { Agent, run, setDefaultOpenAIClient, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";
import { CITIES, ENDLESS_SCHEMA, KEY, MODEL, URL_, WEATHER, check, leaving, report, version } from "./case.mjs";

setDefaultOpenAIClient(new OpenAI({ baseURL: `${URL_}/v1`, apiKey: KEY, maxRetries: 0 }));
setTracingDisabled(true);
const short = { maxTokens: 300 };

await report({ "@openai/agents": version("@openai/agents") }, {
  async chat() {
    const agent = new Agent({ name: "a", instructions: "Be brief.", model: MODEL, modelSettings: short });
    check((await run(agent, "Hello!")).finalOutput, "no text");
  },
  async stream() {
    const agent = new Agent({ name: "a", instructions: "Be brief.", model: MODEL, modelSettings: short });
    const result = await run(agent, "Hello!", { stream: true });
    let count = 0;
    for await (const _ of result) count++;
    check(count > 2, "no events");
  },
  async tools() {
    let called = 0;
    const weather = tool({
      name: "get_weather", description: "The weather in a city", parameters: z.object({ city: z.enum(CITIES) }),
      execute: async () => (called++, "7 degrees, rain"),
    });
    const agent = new Agent({
      name: "a", instructions: "Use tools.", model: MODEL, tools: [weather],
      modelSettings: { ...short, toolChoice: "required" },
    });
    await run(agent, WEATHER, { maxTurns: 4 });
    check(called > 0, "the tool was not called");
  },
  async cancel() {
    const text = { format: { type: "json_schema", name: "long", schema: ENDLESS_SCHEMA } };
    const agent = new Agent({ name: "a", instructions: "Be brief.", model: MODEL, modelSettings: { providerData: { text } } });
    await leaving(async () => {
      const abort = new AbortController();
      const result = await run(agent, "Hello!", { stream: true, signal: abort.signal });
      for await (const event of result) {
        if (event.type === "raw_model_stream_event" && event.data.type === "output_text_delta") break;
      }
      abort.abort();
    });
  },
  async structured() {
    const agent = new Agent({
      name: "a", instructions: "Be brief.", model: MODEL, outputType: z.object({ city: z.enum(CITIES) }), modelSettings: short,
    });
    check(typeof (await run(agent, "Which city? Oslo")).finalOutput.city === "string", "no city");
  },
});
