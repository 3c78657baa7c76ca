// Published clients of npm, unchanged, against a server of a tiny model:   node clients.mjs URL FOLDER
// FOLDER: has node_modules. Prints a JSON object: for each attempt what it returned, or "Error: ...".
import {createRequire} from "node:module";
const [url, folder] = process.argv.slice(2);
const need = createRequire(folder + "/");
const OpenAI = need("openai");
const {createOpenAICompatible} = need("@ai-sdk/openai-compatible");
const {generateObject, generateText, jsonSchema, streamObject, streamText, tool} = need("ai");

const found = {};
async function attempt(name, f) {
  try { found[name] = await f(); }
  catch (error) { found[name] = `Error: ${error.name}: ${error.message} ${error.responseBody ?? ""}`.slice(0, 600); }
}

const client = new OpenAI({baseURL: url + "/v1", apiKey: "x", maxRetries: 0});
const messages = [{role: "user", content: "def f"}];
const short = {model: "tiny", messages, max_tokens: 8, seed: 3};
await attempt("openai.js chat", async () => (await client.chat.completions.create(short)).choices[0].message.content);
await attempt("openai.js stream", async () => {
  let text = "";
  for await (const chunk of await client.chat.completions.create({...short, stream: true})) text += chunk.choices[0]?.delta?.content ?? "";
  return text;
});
await attempt("openai.js responses", async () => {
  const stream = client.responses.stream({model: "tiny", input: "def f", max_output_tokens: 8, seed: 3});
  let text = "";
  for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
  return text;
});

const city = {type: "object", properties: {city: {type: "string", maxLength: 3}}, required: ["city"], additionalProperties: false};
const person = {type: "object", properties: {name: {type: "string", maxLength: 3}, age: {type: "integer", minimum: 0, maximum: 9}},
  required: ["name", "age"], additionalProperties: false};
const provider = createOpenAICompatible({name: "x", baseURL: url + "/v1", apiKey: "x", supportsStructuredOutputs: true});
const model = provider("tiny");
const options = {model, prompt: "def f", seed: 3, maxRetries: 0, maxOutputTokens: 900};
const tools = {weather: tool({description: "the weather", inputSchema: jsonSchema(city)})};
await attempt("ai generateText", async () => (await generateText({...options, maxOutputTokens: 8})).text);
await attempt("ai streamText", async () => {
  let text = "";
  for await (const part of streamText({...options, maxOutputTokens: 8}).textStream) text += part;
  return text;
});
await attempt("ai generateObject", async () => (await generateObject({...options, schema: jsonSchema(person)})).object);
await attempt("ai streamObject", async () => {
  const result = streamObject({...options, schema: jsonSchema(person)});
  for await (const _ of result.partialObjectStream);
  return await result.object;
});
await attempt("ai tools", async () => (await generateText({...options, tools, toolChoice: "required"})).toolCalls[0].input);
await attempt("ai stream tools", async () => {
  const result = streamText({...options, tools, toolChoice: {type: "tool", toolName: "weather"}});
  for await (const _ of result.fullStream);
  return (await result.toolCalls)[0].input;
});
console.log(JSON.stringify(found));
