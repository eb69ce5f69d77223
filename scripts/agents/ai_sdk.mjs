// The AI SDK by its two defaults: OpenAI's provider, which speaks responses, and Anthropic's, which speaks messages.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import assert from "node:assert";
import { z } from "zod";
import { ask, model, run } from "./checks.mjs";

const baseURL = process.env.OPENAI_BASE_URL, apiKey = process.env.OPENAI_API_KEY;
const City = z.object({ name: z.string().max(12), people: z.number().int().min(0).max(99) });
const checks = {};

for (const [name, provider] of Object.entries({ openai: createOpenAI, anthropic: createAnthropic })) {
  const fields = { model: provider({ baseURL, apiKey })(model), maxOutputTokens: 200, temperature: 0, maxRetries: 0 };
  const agent = (asked) => ({
    ...fields, prompt: ask, stopWhen: stepCountIs(3),
    tools: {
      get_weather: tool({
        description: "Tells the weather in a city.",
        inputSchema: z.object({ city: z.string() }),
        execute: async ({ city }) => (asked.push(city), "sunny"),
      }),
    },
  });
  checks[`${name}: a tool that it calls, and the answer after it`] = async () => {
    const asked = [];
    assert.match((await generateText(agent(asked))).text, /sunny/);
    assert.deepEqual(asked, ["Paris"]);
  };
  checks[`${name}: the same as it streams`] = async () => {
    const asked = [];
    const result = streamText(agent(asked));
    let text = "";
    for await (const part of result.textStream) text += part;
    assert.match(text, /sunny/);
    assert.deepEqual(asked, ["Paris"]);
    assert.ok((await result.usage).outputTokens > 3);
  };
  checks[`${name}: an object of a zod schema`] = async () => {
    const { output } = await generateText({ ...fields, prompt: "Paris", output: Output.object({ schema: City }) });
    City.parse(output);
  };
}

await run(checks);
