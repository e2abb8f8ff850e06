// node smoke.mjs BASE_URL MODEL: whole and streamed answers, a tool call, usage, an error.
// Prints one JSON object; whoever runs it compares.
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const tools = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather",
      parameters: { type: "object", properties: { city: { type: "string" } } },
    },
  },
];
const messages = [{ role: "user", content: "weather?" }];

const whole = await client.chat.completions.create({ model, messages, tools });

const runner = client.chat.completions.stream({
  model,
  messages,
  tools,
  stream_options: { include_usage: true },
});
let pieces = 0;
for await (const _ of runner) pieces += 1;
const streamed = await runner.finalChatCompletion();

let refused;
try {
  await client.chat.completions.create({ model: "nobody", messages });
} catch (error) {
  refused = { status: error.status, code: error.code, param: error.param };
}

console.log(
  JSON.stringify({
    whole: whole.choices[0].message.tool_calls,
    streamed: streamed.choices[0].message.tool_calls,
    finish: [whole.choices[0].finish_reason, streamed.choices[0].finish_reason],
    usage: [whole.usage.total_tokens, streamed.usage.total_tokens],
    pieces,
    refused,
    models: (await client.models.list()).data.map((entry) => entry.id),
  }),
);
