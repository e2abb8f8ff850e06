// The AI SDK through @ai-sdk/openai-compatible.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import {
  CITIES, ENDLESS, HISTORY, KEY, MODEL, SESSION, URL_, WEATHER, begun, check, leaving, report, version,
} from "./case.mjs";

const provider = createOpenAICompatible({
  name: "penstock", baseURL: `${URL_}/v1`, apiKey: KEY, includeUsage: true, supportsStructuredOutputs: true,
});
const model = provider(MODEL);
const plain = createOpenAICompatible({ name: "penstock", baseURL: `${URL_}/v1`, apiKey: KEY })(MODEL);

await report({ ai: version("ai") }, {
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
      description: "The weather in a city", inputSchema: z.object({ city: z.enum(CITIES) }),
      execute: async () => (called++, { temperature: 7, condition: "rain" }),
    });
    await generateText({
      model, prompt: WEATHER, tools: { get_weather }, toolChoice: "required", stopWhen: stepCountIs(2),
      maxOutputTokens: 300, maxRetries: 0,
    });
    check(called > 0, "the tool was not called");
  },
  async second_turn_is_cached() {
    const messages = [{ role: "user", content: HISTORY }];
    const cached = [];
    for (let turn = 0; turn < 2; turn++) {
      const answer = await generateText({ model, messages, headers: SESSION, maxOutputTokens: 20, maxRetries: 0 });
      cached.push(answer.usage.cachedInputTokens);
      messages.push(...answer.response.messages, { role: "user", content: "And then?" });
    }
    check(cached[0] < 100 && cached[1] > 100, `cached: ${cached}`);
  },
  async cancel() {
    const asked = { model, prompt: "Hello!", maxRetries: 0, providerOptions: { penstock: ENDLESS } };
    await leaving(async () => {
      const abort = new AbortController();
      for await (const _ of streamText({ ...asked, abortSignal: abort.signal }).textStream) break;
      abort.abort();
    });
    await leaving(async () => {
      const abort = new AbortController();
      const whole = generateText({ ...asked, abortSignal: abort.signal }).catch((error) => error);
      await begun();
      abort.abort();
      check((await whole).name === "AbortError", "the client was not aborted");
    });
  },
  async structured() {
    const schema = z.object({ city: z.enum(CITIES) });
    const found = await generateObject({ model, prompt: "Which city? Oslo", schema, maxOutputTokens: 300, maxRetries: 0 });
    check(typeof found.object.city === "string", "no city");
  },
  async json_object() {
    const asked = { model: plain, prompt: "Which city? Oslo", output: "no-schema", maxOutputTokens: 300, maxRetries: 0 };
    try {
      check(typeof (await generateObject(asked)).object === "object", "no object");
    } catch (error) {
      if (error.finishReason !== "length") throw error; // a small model may fill any JSON to the limit
    }
  },
});
