// openai for Node: tool calls, parallel and streamed, runTools, parse with zod, log probabilities.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import assert from "node:assert";

const client = new OpenAI(); // reads OPENAI_BASE_URL and OPENAI_API_KEY
const model = process.env.SLUICE_MODEL;
const ask = (content) => [{ role: "user", content }];
const tools = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Tells the weather in a city.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];
const City = z.object({ name: z.string().max(12), people: z.number().int().min(0).max(99) });

const checks = {
  "a tool call": async () => {
    const answer = await client.chat.completions.create({ model, tools, temperature: 0, messages: ask("What is the weather in Paris?") });
    const [call] = answer.choices[0].message.tool_calls;
    assert.equal(answer.choices[0].finish_reason, "tool_calls");
    assert.deepEqual(JSON.parse(call.function.arguments), { city: "Paris" });
  },
  "two calls in one stream": async () => {
    const stream = client.chat.completions.stream({ model, tools, temperature: 0, messages: ask("What is the weather in Paris and in Oslo?") });
    const answer = await stream.finalChatCompletion();
    const cities = answer.choices[0].message.tool_calls.map((call) => JSON.parse(call.function.arguments).city);
    assert.deepEqual(cities, ["Paris", "Oslo"]);
  },
  "a function that runTools calls": async () => {
    const asked = [];
    const runner = client.chat.completions.runTools({
      model, temperature: 0, messages: ask("What is the weather in Paris?"),
      tools: [{ type: "function", function: { ...tools[0].function, parse: JSON.parse, function: ({ city }) => (asked.push(city), "sunny") } }],
    });
    assert.match(await runner.finalContent(), /sunny/);
    assert.deepEqual(asked, ["Paris"]);
  },
  "parse with zod": async () => {
    const answer = await client.chat.completions.parse({ model, messages: ask("Paris"), max_tokens: 200, response_format: zodResponseFormat(City, "city") });
    City.parse(answer.choices[0].message.parsed);
  },
  "log probabilities": async () => {
    const answer = await client.chat.completions.create({ model, logprobs: true, top_logprobs: 2, messages: ask("Count from 3 to 6.") });
    assert.ok(answer.choices[0].logprobs.content.length > 3);
  },
};

for (const [check, run] of Object.entries(checks)) {
  let problem = null;
  try {
    await run();
  } catch (error) {
    problem = String(error.stack).slice(0, 1500);
  }
  console.log(JSON.stringify({ check, problem }));
}
