// The API, as the page uses it: one streamed chat, event by event. Knows no element.

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

function headers(key) {
  const sent = { "content-type": "application/json" };
  if (!key) return sent;
  if (!/^[\x21-\x7e]+$/.test(key)) {
    throw new ApiError("An API key has only letters, digits and signs of ASCII.", 401);
  }
  return { ...sent, authorization: `Bearer ${key}` };
}

async function refusal(response) {
  let message = `The service answered ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Not ours: a proxy's page.
  }
  return new ApiError(message, response.status);
}

// What the browser says of a lost connection differs, and is no sentence.
function asSentence(error, sentence) {
  const isKnown = error instanceof ApiError || error.name === "AbortError";
  return isKnown ? error : new ApiError(sentence, 0);
}

async function ask(path, key, options) {
  const sent = headers(key);
  let response;
  try {
    response = await fetch(path, { ...options, headers: sent });
  } catch (error) {
    throw asSentence(error, "The service could not be reached.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

// As the API lists them.
export async function models(key, signal) {
  const response = await ask("v1/models", key, { signal });
  return (await response.json()).data;
}

// Every event is one line of data; a line that begins with a colon only keeps the connection alive.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  }
}

// Calls `onChunk` with every chunk. Throws ApiError; AbortError when `signal` ends it.
export async function chat(body, key, signal, onChunk) {
  const options = { method: "POST", body: JSON.stringify(body), signal };
  const response = await ask("v1/chat/completions", key, options);
  let isWhole = false;
  try {
    // Read to its end, also behind [DONE]: then its connection can be used again.
    for await (const data of events(response)) {
      isWhole ||= data === "[DONE]";
      if (isWhole) continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, 0);
      onChunk(chunk);
    }
  } catch (error) {
    throw asSentence(error, "The connection broke before the answer was whole.");
  }
  if (!isWhole) throw new ApiError("The stream ended before the answer did.", 0);
}
