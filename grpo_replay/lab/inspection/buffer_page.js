"use strict";
// Text of a run only ever becomes text nodes: nothing here parses it as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const part = (name) => document.getElementById(name);
const form = document.forms[0], panel = part("rollout"), heads = [...document.querySelectorAll("#rollouts th")];
const byId = new Map(data.rollouts.map((each) => [each.id, each]));
const ROWS = 200; // shown at a time
const FULL_COLOUR = 5; // nats at which a token has its full colour

// The value of each column of the table, and the digits of a number (null: text).
const COLUMNS = [
  [(r) => r.id, 0], [(r) => r.step, 0], [(r) => r.prompt_id, null], [(r) => r.fate, null], [(r) => r.verdict, null],
  [(r) => r.reward, 2], [(r) => r.advantage, 2], [(r) => r.tokens, 0], [(r) => r.draws, 0],
  [(r) => r.clipped, 1], [(r) => r.kl, 4], [(r) => r.text ?? r.token_ids.join(" "), null],
];
let order = { column: 8, down: true }, limit = ROWS, matching = [];

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// Controls, and marks that change the direction of text, are made visible.
function visible(text) {
  return text.replace(/[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g,
    (mark) => `⟨U+${mark.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

function number(value, digits) {
  const format = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  return value === null ? "–" : value.toLocaleString("en", format).replace("-", "−");
}

function cell(value, digits) {
  if (digits !== null) return element("td", {}, number(value, digits));
  return element("td", { className: "left" }, visible(value.slice(0, 200)));
}

function line(values) {
  return element("tr", {}, ...values.map((each) => element("td", {}, each)));
}

function matches(rollout, wanted) {
  const { kept, draws, fate, step } = rollout;
  const states = { kept, stored: fate === "stored", replayed: draws > 0, dropped: !kept };
  if (wanted.state && !states[wanted.state]) return false;
  if (wanted.verdict && rollout.verdict !== wanted.verdict) return false;
  if (wanted.from && step < Number(wanted.from) || wanted.to && step > Number(wanted.to)) return false;
  if (!wanted.text) return true;
  rollout.search ??= `${rollout.text ?? ""}\n${data.prompts[rollout.prompt]}\n${rollout.prompt_id}`.toLowerCase();
  return rollout.search.includes(wanted.text.toLowerCase());
}

function select() {
  const wanted = Object.fromEntries(new FormData(form));
  const sign = order.down ? -1 : 1, [value] = COLUMNS[order.column];
  const key = (rollout) => value(rollout) ?? sign * Infinity; // what is not defined comes last
  matching = data.rollouts.filter((each) => matches(each, wanted));
  matching.sort((a, b) => sign * (key(a) < key(b) ? -1 : Number(key(a) > key(b))));
  limit = ROWS;
  show();
}

function opened() {
  return byId.get(Number(/^#rollout-(\d+)$/.exec(location.hash)?.[1]));
}

function show() {
  part("matching").replaceChildren(...matching.slice(0, limit).map((rollout) => {
    const [, ...cells] = COLUMNS.map(([value, digits]) => cell(value(rollout), digits));
    const link = element("a", { href: `#rollout-${rollout.id}` }, String(rollout.id));
    cells.at(-1).classList.add("mono");
    return element("tr", { className: rollout === opened() ? "open" : "", onclick: () => link.click() },
      element("td", {}, link), ...cells);
  }));
  part("found").value = matching.length === data.rollouts.length ? "" : `${matching.length} of ${data.rollouts.length}`;
  part("more").hidden = matching.length <= limit;
  const direction = order.down ? "descending" : "ascending";
  heads.forEach((head, at) => head.setAttribute("aria-sort", at === order.column ? direction : "none"));
}

function token(rollout, at) {
  const id = rollout.token_ids[at], piece = data.pieces[id], logprob = rollout.logprobs?.[at];
  const span = element("span", {}, piece === undefined ? `${id} ` : visible(piece));
  span.classList.toggle("special", data.special.includes(id));
  span.classList.toggle("untrained", rollout.trained?.[at] === 0);
  span.title = `token ${id}${logprob === undefined ? "" : `, log-prob ${logprob}`}`;
  const strength = logprob === undefined ? 0 : Math.min(1, -logprob / FULL_COLOUR);
  span.style.background = `rgb(213 94 0 / ${0.8 * strength})`;
  return span;
}

function showCompletion(rollout) {
  const choice = part("as-tokens"), isText = rollout.text !== null && !choice.checked;
  choice.disabled = rollout.text === null;
  part("completion").replaceChildren(
    ...(isText ? [visible(rollout.text)] : rollout.token_ids.map((_, at) => token(rollout, at))));
  const cut = isText ? rollout.text_cut : rollout.tokens_cut, unit = isText ? "characters" : "tokens";
  const all = data.path ? `: grpo-replay inspect-buffer ${data.path} --show ${rollout.id}` : "";
  part("cut").textContent = cut ? `… and ${number(cut, 0)} more ${unit}${all}` : "";
  part("legend").hidden = isText || !rollout.logprobs;
  part("whose").textContent = rollout.logprobs_of;
}

function member(rollout, { id, reward, advantage, verdict }) {
  const isOther = byId.has(id) && id !== rollout.id;
  const name = isOther ? element("a", { href: `#rollout-${id}` }, String(id)) : String(id);
  const made = line([name, number(reward, 3), number(advantage, 3), verdict]);
  made.classList.toggle("open", id === rollout.id);
  return made;
}

function use({ step, age, probability, clipped, log_ratio, kl }) {
  const drawn = probability === null ? "fresh" : number(probability, 5);
  return line([String(step), String(age), drawn, number(clipped, 1), number(log_ratio, 4), number(kl, 4)]);
}

function open() {
  const rollout = opened();
  panel.hidden = !rollout;
  show();
  if (!rollout) return;
  part("name").textContent = `Rollout ${rollout.id}`;
  part("facts").textContent = [
    `born in step ${rollout.step}`, rollout.fate, rollout.verdict, `reward ${number(rollout.reward, 3)}`,
    `advantage ${number(rollout.advantage, 3)}`, `${number(rollout.tokens, 0)} tokens (${rollout.finish})`, rollout.why,
  ].filter(Boolean).join(" · ");
  part("prompt-id").textContent = visible(rollout.prompt_id);
  part("prompt").textContent = visible(data.prompts[rollout.prompt]);
  showCompletion(rollout);
  part("uses").replaceChildren(...rollout.uses.map(use));
  part("draws").textContent = data.has_uses ? "" : `Drawn ${rollout.draws} times; a run directory has each use.`;
  part("members").replaceChildren(...data.groups[rollout.group].map((each) => member(rollout, each)));
  panel.scrollTop = 0;
  panel.focus({ preventScroll: true });
}

heads.forEach((head, at) => head.firstChild.addEventListener("click", () => {
  order = { column: at, down: order.column === at ? !order.down : COLUMNS[at][1] !== null };
  select();
}));
form.oninput = select;
form.onreset = () => setTimeout(select);
part("more").onclick = () => { limit += ROWS; show(); };
part("as-tokens").onchange = () => showCompletion(opened());
onkeydown = (event) => { if (event.key === "Escape" && !panel.hidden) part("close").click(); };
onhashchange = open;
select();
open();
