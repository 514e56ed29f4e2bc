"use strict";
// Asks the server of this page, and shows its answers as text while they come.
const part = (name) => document.getElementById(name);
let token = "", model = null, messages = [], running = null;

function headers(more) {
  return token ? { ...more, Authorization: `Bearer ${token}` } : more;
}

function tell(problem) {
  part("problem").textContent = problem;
  part("problem").hidden = !problem;
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered with status ${response.status}`;
  }
}

async function connect() {
  const response = await fetch("v1/models", { headers: headers({}) });
  part("login").hidden = response.status !== 401;
  if (!response.ok) {
    tell(response.status === 401 && !token ? "" : await reason(response));
    return;
  }
  tell("");
  model = (await response.json()).data[0];
  part("name").textContent = model.id;
  part("kind").textContent = model.has_chat ? "answers messages" : "continues texts";
  part("context").textContent = model.context.toLocaleString("en");
  part("temperature").placeholder = model.temperature;
  part("max_tokens").max = model.max_tokens;
  part("max_tokens").value = Math.min(model.max_tokens, 128);
  part("prompt").placeholder = model.has_chat ? "A message" : "The beginning of a text";
  part("model").hidden = false;
  part("prompt").focus();
}

function shown(title, text) {
  const figure = document.createElement("figure"), caption = document.createElement("figcaption"), body = document.createElement("pre");
  caption.textContent = title;
  body.dir = "auto";
  body.append(text);
  figure.append(caption, body);
  part("log").append(figure);
  return body;
}

function sampling() {
  const given = {};
  for (const name of ["max_tokens", "temperature", "top_p", "seed"]) {
    if (part(name).value !== "") given[name] = Number(part(name).value);
  }
  return given;
}

// Calls `use` with each event of a stream as an object.
async function follow(response, use) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the answer was cut off");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      use(JSON.parse(data));
    }
  }
}

async function ask(text) {
  const asked = { model: model.id, stream: true, stream_options: { include_usage: true }, ...sampling() };
  let path = "v1/completions", body;
  if (model.has_chat) {
    path = "v1/chat/completions";
    messages.push({ role: "user", content: text });
    asked.messages = messages;
    shown("you", text).className = "you";
    body = shown("model", "");
  } else {
    asked.prompt = text;
    const start = document.createElement("b");
    start.textContent = text;
    body = shown(`${model.id}`, start);
  }
  const answer = document.createTextNode(""), begin = performance.now();
  body.append(answer);
  running = new AbortController();
  part("stop").disabled = false;
  part("send").disabled = true;
  tell("");
  try {
    const options = { method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(asked) };
    const response = await fetch(path, { ...options, signal: running.signal });
    if (!response.ok) throw new Error(await reason(response));
    await follow(response, (event) => {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) {
        const number = event.usage.completion_tokens, seconds = (performance.now() - begin) / 1000;
        part("count").textContent = number.toLocaleString("en");
        part("speed").textContent = `tokens, ${(number / seconds).toFixed(1)} per second`;
      }
      for (const choice of event.choices) answer.data += (model.has_chat ? choice.delta.content : choice.text) ?? "";
    });
  } catch (error) {
    if (error.name !== "AbortError") tell(error.message);
    if (!answer.data && model.has_chat) {
      messages.pop();
      part("prompt").value = text;
    }
  } finally {
    if (answer.data && model.has_chat) messages.push({ role: "assistant", content: answer.data });
    running = null;
    part("stop").disabled = true;
    part("send").disabled = false;
    body.scrollIntoView({ block: "nearest" });
  }
}

part("login").addEventListener("submit", (event) => {
  event.preventDefault();
  token = part("token").value.trim();
  connect().catch((error) => tell(error.message));
});
part("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = part("prompt").value;
  if (running || (model.has_chat && !text.trim())) return;
  if (model.has_chat) part("prompt").value = "";
  ask(text);
});
part("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey || (model.has_chat && !event.shiftKey))) {
    event.preventDefault();
    part("ask").requestSubmit();
  }
});
part("stop").addEventListener("click", () => running?.abort());
part("clear").addEventListener("click", () => {
  running?.abort();
  messages = [];
  part("log").replaceChildren();
  tell("");
});
connect().catch((error) => tell(error.message));
