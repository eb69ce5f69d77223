// Anthropic's SDK for Node: messages whole and streamed, tools and their results, counts, errors.
import Anthropic from "@anthropic-ai/sdk";
import assert from "node:assert";
import { ask, model, run } from "./checks.mjs";

const client = new Anthropic(); // reads ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY
const said = (content) => [{ role: "user", content }];
const tools = [
  {
    name: "get_weather",
    description: "Tells the weather in a city.",
    input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
];
const fields = { model, max_tokens: 200, temperature: 0 };

await run({
  "a message as it streams": async () => {
    const stream = client.messages.stream({ ...fields, messages: said("Count from 3 to 6.") });
    assert.equal(await stream.finalText(), "3, 4, 5, 6");
    const { usage } = await stream.finalMessage();
    assert.ok(usage.input_tokens + usage.cache_read_input_tokens > 5 && usage.output_tokens > 3);
  },
  "a tool, its result, and the answer": async () => {
    const messages = said(ask);
    const first = await client.messages.create({ ...fields, tools, messages });
    const use = first.content.find((block) => block.type === "tool_use");
    assert.deepEqual([use.input, first.stop_reason], [{ city: "Paris" }, "tool_use"]);
    messages.push({ role: "assistant", content: first.content });
    messages.push({ role: "user", content: [{ type: "tool_result", tool_use_id: use.id, content: "sunny" }] });
    const second = await client.messages.create({ ...fields, tools, messages });
    assert.match(second.content[0].text, /sunny/);
  },
  "a tool as it streams": async () => {
    const stream = client.messages.stream({ ...fields, tools, messages: said(ask), tool_choice: { type: "any" } });
    assert.deepEqual((await stream.finalMessage()).content.find((block) => block.type === "tool_use").input, { city: "Paris" });
  },
  "a count of tokens": async () => {
    assert.ok((await client.messages.countTokens({ model, messages: said(ask) })).input_tokens > 5);
  },
  "an error of its own types": async () => {
    await assert.rejects(client.messages.create({ ...fields, model: "none", messages: said(ask) }), Anthropic.NotFoundError);
  },
});
