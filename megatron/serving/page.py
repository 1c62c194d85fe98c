# SPDX-License-Identifier: Apache-2.0
"""The page on which one tries the model: a single file, which asks for nothing from elsewhere."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Try the model</title>
<link rel="icon" href="data:,">
<style>
:root { color-scheme: light dark; --ink: light-dark(#1c1e21, #e6e7e9); --soft: light-dark(#5d636b, #a0a6ae);
  --ground: light-dark(#fbfbfa, #16181b); --field: light-dark(#ffffff, #1f2226); --line: light-dark(#c9cdd2, #43484f);
  --accent: light-dark(#0b5cad, #7db8f5); --on-accent: light-dark(#ffffff, #10202f);
  --bad: light-dark(#a8201a, #ff9a92); }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 46rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.25rem; margin: 0; }
p { margin: .25rem 0 1rem; color: var(--soft); overflow-wrap: anywhere; }
label { display: block; font-size: .875rem; color: var(--soft); }
textarea, input, select { width: 100%; min-height: 2.5rem; font: inherit; color: var(--ink); background: var(--field);
  border: 1px solid var(--line); border-radius: 6px; padding: .5rem .6rem; }
textarea { min-height: 7rem; resize: vertical; }
fieldset { border: 0; padding: 0; margin: 1rem 0; display: grid; gap: .75rem;
  grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); }
@media (max-width: 46rem) { fieldset label:last-child { grid-column: 1 / -1; } }
#state { margin: .75rem 0; min-height: 1.5em; }
button { font: inherit; padding: .5rem 1.1rem; border-radius: 6px; border: 1px solid var(--accent); cursor: pointer;
  background: var(--accent); color: var(--on-accent); }
button.quiet { background: transparent; color: var(--accent); }
button:disabled { opacity: .5; cursor: default; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--field); border: 1px solid var(--line);
  border-radius: 6px; padding: .75rem; min-height: 6rem; font: 15px/1.55 ui-monospace, monospace; }
.given { color: var(--soft); }
.bad { color: var(--bad); }
</style>
</head>
<body>
<main>
<h1>Try the model</h1>
<p id="model">asking which model it is</p>
<form id="form">
<label for="prompt">Text to continue, or a message</label>
<textarea id="prompt" required>Once upon a time</textarea>
<fieldset>
<label>Ask as<select id="kind"><option value="text">text</option><option value="chat">chat</option></select></label>
<label>New tokens<input id="tokens" type="number" min="1" max="8192" value="128"></label>
<label>Temperature<input id="temperature" type="number" min="0" max="5" step="0.1" value="0.8"></label>
<label>Top-p<input id="topp" type="number" min="0" max="1" step="0.05" value="0.95"></label>
<label>API key<input id="key" type="password" autocomplete="off" placeholder="if asked for"></label>
</fieldset>
<button id="go">Continue</button> <button id="stop" type="button" class="quiet" disabled>Stop</button>
</form>
<p id="state" role="status"></p>
<pre id="out" aria-label="text of the model"></pre>
</main>
<script>
const at = id => document.getElementById(id);
let running = null;
const headers = () => Object.assign({"Content-Type": "application/json"},
  at("key").value ? {"Authorization": "Bearer " + at("key").value} : {});
function say(text, bad) { at("state").textContent = text; at("state").className = bad ? "bad" : ""; }
async function describe() {
  try {
    const answer = await fetch("v1/models", {headers: headers()}), found = await answer.json();
    at("model").textContent = answer.ok
      ? found.data[0].id + ", up to " + found.data[0].max_model_len + " tokens" : found.error.message;
  } catch (error) { at("model").textContent = "the server does not answer"; }
}
at("key").addEventListener("change", describe);
at("stop").addEventListener("click", () => running && running.abort());
at("form").addEventListener("submit", async event => {
  event.preventDefault();
  const chat = at("kind").value === "chat", prompt = at("prompt").value, out = at("out");
  const body = {stream: true, max_tokens: +at("tokens").value, temperature: +at("temperature").value,
    top_p: +at("topp").value};
  if (chat) body.messages = [{role: "user", content: prompt}]; else body.prompt = prompt;
  out.textContent = "";
  if (!chat) { const given = document.createElement("span"); given.className = "given"; given.textContent = prompt;
    out.append(given); }
  running = new AbortController(); at("go").disabled = true; at("stop").disabled = false; say("writing");
  const began = performance.now(); let pieces = 0, reason = "";
  try {
    const answer = await fetch(chat ? "v1/chat/completions" : "v1/completions",
      {method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal});
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader(); let held = "";
    for (;;) {
      const {value, done} = await reader.read(); if (done) break;
      const lines = (held + value).split("\\n\\n"); held = lines.pop();
      for (const line of lines) {
        const data = line.slice(6); if (data === "[DONE]") continue;
        const found = JSON.parse(data); if (found.error) throw new Error(found.error.message);
        for (const choice of found.choices) {
          out.append(chat ? choice.delta.content || "" : choice.text); pieces += 1;
          reason = choice.finish_reason || reason;
        }
      }
    }
    const seconds = (performance.now() - began) / 1000;
    const end = reason === "length" ? "stopped at its length, " : "ended, ";
    say(end + (pieces / seconds).toFixed(1) + " pieces a second");
  } catch (error) { say(error.name === "AbortError" ? "stopped" : error.message, error.name !== "AbortError"); }
  running = null; at("go").disabled = false; at("stop").disabled = true;
});
describe();
</script>
</body>
</html>
"""
