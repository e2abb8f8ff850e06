// The official client for Node, and its helpers for tools and structured output.
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { VERSION } from "openai/version";
import { z } from "zod";
import {
  CITIES, ENDLESS, HISTORY, KEY, MODEL, SESSION, URL_, WEATHER, begun, check, leaving, report,
} from "./case.mjs";

const client = new OpenAI({ baseURL: `${URL_}/v1`, apiKey: KEY, maxRetries: 0 });
const messages = [{ role: "user", content: "Hello!" }];
const Place = z.object({ city: z.enum(CITIES) });

await report({ openai: VERSION }, {
  async chat() {
    const answer = await client.chat.completions.create({ model: MODEL, messages, max_tokens: 40 });
    check(answer.choices[0].message.content, "no text");
  },
  async stream() {
    const stream = await client.chat.completions.create({
      model: MODEL, messages, max_tokens: 40, stream: true, stream_options: { include_usage: true },
    });
    let usage;
    for await (const chunk of stream) usage = chunk.usage ?? usage;
    check(usage.completion_tokens > 0, "no usage");
  },
  async tools() {
    let called = 0;
    const runner = client.chat.completions.runTools({
      model: MODEL,
      messages: [{ role: "user", content: WEATHER }],
      max_tokens: 300,
      tool_choice: { type: "function", function: { name: "get_weather" } },
      tools: [zodFunction({
        name: "get_weather", parameters: Place, function: async () => (called++, { temperature: 7, condition: "rain" }),
      })],
    });
    await runner.done();
    check(called > 0, "the tool was not called");
  },
  async structured() {
    const answer = await client.chat.completions.parse({
      model: MODEL, messages: [{ role: "user", content: "Which city? Oslo" }], max_tokens: 300,
      response_format: zodResponseFormat(Place, "place"),
    });
    check(typeof answer.choices[0].message.parsed.city === "string", "no city");
  },
  async responses() {
    const answer = await client.responses.parse({
      model: MODEL, input: "Which city? Oslo", max_output_tokens: 300, text: { format: zodTextFormat(Place, "place") },
    });
    check(typeof answer.output_parsed.city === "string", "no city");
    const events = await client.responses.create({ model: MODEL, input: "Hello!", max_output_tokens: 40, stream: true });
    let last;
    for await (const event of events) last = event.type;
    check(["response.completed", "response.incomplete"].includes(last), last);
  },
  async second_turn_is_cached() {
    const turns = [{ role: "user", content: HISTORY }];
    const cached = [];
    for (let turn = 0; turn < 2; turn++) {
      const answer = await client.chat.completions.create(
        { model: MODEL, messages: turns, max_tokens: 20 }, { headers: SESSION },
      );
      cached.push(answer.usage.prompt_tokens_details.cached_tokens);
      turns.push(answer.choices[0].message, { role: "user", content: "And then?" });
    }
    check(cached[0] < 100 && cached[1] > 100, `cached: ${cached}`);
  },
  async cancel() {
    await leaving(async () => {
      const stream = await client.chat.completions.create({ model: MODEL, messages, stream: true, ...ENDLESS });
      for await (const _ of stream) break;
    });
    await leaving(async () => {
      const abort = new AbortController();
      const { signal } = abort;
      const whole = client.chat.completions.create({ model: MODEL, messages, ...ENDLESS }, { signal }).catch((error) => error);
      await begun();
      abort.abort();
      check((await whole) instanceof OpenAI.APIUserAbortError, "the client was not aborted");
    });
  },
  async eight_at_once() {
    const ask = () => client.chat.completions.create({ model: MODEL, messages, max_tokens: 20 });
    check((await Promise.all(Array.from({ length: 8 }, ask))).every((answer) => answer.choices.length), "an answer lacks");
  },
});
