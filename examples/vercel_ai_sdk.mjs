// The Vercel AI SDK: a text that streams, and a model that calls a tool and goes on with its result.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const sluice = createOpenAICompatible({
  name: "sluice",
  baseURL: process.env.OPENAI_BASE_URL,
  apiKey: process.env.OPENAI_API_KEY,
  includeUsage: true,
});
const model = sluice(process.env.SLUICE_MODEL ?? "embedded");

const counted = streamText({ model, prompt: "Count from 3 to 12.", temperature: 0 });
for await (const piece of counted.textStream) process.stdout.write(piece);
console.log(`\n${(await counted.usage).outputTokens} tokens`);

const weather = streamText({
  model,
  prompt: "What is the weather in Oslo?",
  temperature: 0,
  stopWhen: stepCountIs(3),
  tools: {
    get_weather: tool({
      description: "Tells the weather in a city.",
      inputSchema: z.object({ city: z.string() }),
      execute: ({ city }) => `sunny in ${city}`,
    }),
  },
});
for await (const piece of weather.textStream) process.stdout.write(piece);
console.log();
