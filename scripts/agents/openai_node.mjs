// openai for Node: tool calls, parallel and streamed, runTools, parse with zod, log probabilities, responses.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import assert from "node:assert";
import { model, run } from "./checks.mjs";

const client = new OpenAI(); // reads OPENAI_BASE_URL and OPENAI_API_KEY
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
  "a response, and the one after a tool's result": async () => {
    const input = ask("What is the weather in Paris?");
    const { name, description, parameters } = tools[0].function;
    const asked = { model, temperature: 0, tools: [{ type: "function", name, description, parameters, strict: false }] };
    const first = await client.responses.create({ ...asked, input });
    const [call] = first.output;
    assert.deepEqual(JSON.parse(call.arguments), { city: "Paris" });
    input.push(...first.output, { type: "function_call_output", call_id: call.call_id, output: "sunny" });
    assert.match((await client.responses.create({ ...asked, input })).output_text, /sunny/);
  },
  "a response as it streams": async () => {
    const stream = client.responses.stream({ model, temperature: 0, input: "Count from 3 to 6." });
    let text = "";
    for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
    assert.equal(text, "3, 4, 5, 6");
    assert.equal((await stream.finalResponse()).output_text, text);
  },
  "a response that zod parses": async () => {
    const answer = await client.responses.parse({ model, input: "Paris", max_output_tokens: 200, text: { format: zodTextFormat(City, "city") } });
    City.parse(answer.output_parsed);
  },
};

await run(checks);
