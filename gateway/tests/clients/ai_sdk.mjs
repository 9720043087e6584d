// The AI SDK: prints a line of JSON for each provider, with what its calls returned.
// usage: node ai_sdk.mjs URL, in a directory with the packages.
import { createRequire } from "node:module";
const require = createRequire(`${process.cwd()}/`);
const { Output, generateText, jsonSchema, stepCountIs, streamText, tool } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const { createAnthropic } = require("@ai-sdk/anthropic");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");

const url = process.argv[2];
const at = { baseURL: `${url}/v1`, apiKey: "none" };
const openai = createOpenAI(at), anthropic = createAnthropic(at);
const compatible = createOpenAICompatible({ ...at, name: "gateway", supportsStructuredOutputs: true });
const models = {
  "ai-sdk compatible": compatible.chatModel("mock"),
  "ai-sdk openai": openai.chat("mock"),
  "ai-sdk responses": openai.responses("mock"),
  "ai-sdk anthropic": anthropic("mock"),
  "ai-sdk anthropic, pass": anthropic("passed"),
};
const city = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };
const filled = { ...city, properties: { ...city.properties, degrees: { type: "integer" } }, required: ["city", "degrees"] };
const weather = () => {
  const calls = [];
  const execute = async (input) => { calls.push(["weather", input]); return { Bern: "7", Oslo: "9" }[input.city]; };
  return [calls, { weather: tool({ description: "Weather of a city.", inputSchema: jsonSchema(city), execute }) }];
};
const failed = async (call) => {
  try { return [200, await call()]; } catch (error) { return [error.statusCode ?? error.name, error.message]; }
};

for (const [name, model] of Object.entries(models)) {
  const usual = { model, maxRetries: 0, maxOutputTokens: 100, onError: () => {} };
  const streamed = async (more) => {
    let text = "";
    const result = streamText({ ...usual, ...more });
    for await (const part of result.fullStream) {
      if (part.type === "error") throw part.error;
      if (part.type === "start-step") text = "";
      if (part.type === "text-delta") text += part.text;
    }
    return text;
  };
  const whole = async (more) => (await generateText({ ...usual, ...more })).text;
  const tools = async (run) => {
    const [calls, tools] = weather();
    const text = await run({ prompt: "Weather in Bern and Oslo?", tools, stopWhen: stepCountIs(3) });
    return [calls, text];
  };
  const output = Output.object({ schema: jsonSchema(filled) });
  console.log(JSON.stringify({
    name,
    chat: await whole({ prompt: "Hello." }),
    stream: await streamed({ prompt: "Hello." }),
    tools: [await tools(whole), await tools(streamed)],
    structured: (await generateText({ ...usual, prompt: "Weather.", output })).output,
    errors: [await failed(() => whole({ prompt: "nowhere" })), await failed(() => streamed({ prompt: "nowhere" })),
      await failed(() => whole({ prompt: "broken" })), await failed(() => streamed({ prompt: "broken" }))],
  }));
}
