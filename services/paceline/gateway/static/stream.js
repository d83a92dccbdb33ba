// The API, as the page uses it: one streamed chat, event by event. Knows no element.

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

function headers(key) {
  const sent = { "content-type": "application/json" };
  if (key) sent.authorization = `Bearer ${key}`;
  return sent;
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

export async function models(key) {
  const response = await fetch("v1/models", { headers: headers(key) });
  if (!response.ok) throw await refusal(response);
  return (await response.json()).data.map((model) => model.id);
}

// Calls `onEvent` with every chunk. Throws ApiError; AbortError when `signal` ends it.
export async function chat(body, key, signal, onEvent) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers(key),
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await refusal(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      // A line that begins with a colon only keeps the connection alive.
      if (!event.startsWith("data:")) continue;
      const data = event.slice(5).trim();
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, 0);
      onEvent(chunk);
    }
  }
  throw new ApiError("The stream ended before the answer did.", 0);
}
