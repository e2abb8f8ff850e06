// The AI SDK through @ai-sdk/openai-compatible.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { createRequire } from "node:module";
import { z } from "zod";
import { KEY, MODEL, URL_, WEATHER, check, report } from "./case.mjs";

const { version } = createRequire(import.meta.url)("ai/package.json");
const provider = createOpenAICompatible({
  name: "penstock", baseURL: `${URL_}/v1`, apiKey: KEY, includeUsage: true, supportsStructuredOutputs: true,
});
const model = provider(MODEL);
const plain = createOpenAICompatible({ name: "penstock", baseURL: `${URL_}/v1`, apiKey: KEY })(MODEL);

await report({ ai: version }, {
  async chat() {
    check((await generateText({ model, prompt: "Hello!", maxOutputTokens: 40, maxRetries: 0 })).text, "no text");
  },
  async stream() {
    const result = streamText({ model, prompt: "Hello!", maxOutputTokens: 40, maxRetries: 0 });
    let text = "";
    for await (const piece of result.textStream) text += piece;
    check(text && (await result.usage).outputTokens > 0, "no usage");
  },
  async tools() {
    let called = 0;
    const get_weather = tool({
      description: "The weather in a city", inputSchema: z.object({ city: z.string() }),
      execute: async () => (called++, { temperature: 7, condition: "rain" }),
    });
    await generateText({
      model, prompt: WEATHER, tools: { get_weather }, toolChoice: "required", stopWhen: stepCountIs(2),
      maxOutputTokens: 300, maxRetries: 0,
    });
    check(called > 0, "the tool was not called");
  },
  async structured() {
    const schema = z.object({ city: z.string() });
    const found = await generateObject({ model, prompt: "Which city? Oslo", schema, maxOutputTokens: 300, maxRetries: 0 });
    check(typeof found.object.city === "string", "no city");
  },
  async json_object() {
    const asked = { model: plain, prompt: "Which city? Oslo", output: "no-schema", maxOutputTokens: 300, maxRetries: 0 };
    const found = await generateObject(asked);
    check(typeof found.object === "object", "no object");
  },
});
