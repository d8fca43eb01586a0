// The page: tabs, theme, composer; what is sent goes to the view that is open.

import { offered, readKey, writeKey } from "./api.js";
import { Chat } from "./chat.js";
import { byId } from "./dom.js";
import { Figures } from "./figures.js";
import * as notice from "./notice.js";
import { Race } from "./race.js";
import { offerExamples } from "./schemas.js";
import * as settings from "./settings.js";
import { hide } from "./tokens.js";

const figures = new Figures();
const views = { chat: new Chat(figures), race: new Race(figures) };
let open = "chat";
let running = null; // the AbortController of what runs
const prompt = byId("prompt");

// What runs

async function run(work) {
  if (running) return;
  running = new AbortController();
  notice.clear();
  busy(true);
  try {
    await work(running.signal);
    byId("said").textContent = "Done.";
  } catch (error) {
    report(error);
  } finally {
    running = null;
    busy(false);
  }
}

function busy(on) {
  byId("send").hidden = on;
  byId("stop").hidden = !on;
  byId("fresh").disabled = on;
  document.body.setAttribute("aria-busy", on);
}

function stop() {
  hide();
  running?.abort();
}

function report(error) {
  if (error.name === "AbortError") return;
  if (error.kind === undefined) console.error(error);
  if (error.kind === "key") wantKey();
  const view = views[open];
  notice.tell(error.message, [["Try again", () => run((signal) => view.again(signal))]]);
}

function wantKey() {
  byId("more").open = true;
  byId("key").focus();
}

async function load() {
  try {
    settings.show(await offered());
    notice.clear();
  } catch (error) {
    notice.tell(error.message, [["Try again", load]]);
    if (error.kind === "key") wantKey();
  }
}

// The composer

function send() {
  const text = prompt.value.trim();
  if (!text || running) return;
  const view = views[open];
  if (open === "chat") prompt.value = "";
  fit();
  run((signal) => view.send(text, signal));
}

function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener("input", fit);
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
byId("stop").addEventListener("click", () => {
  stop();
  prompt.focus();
});
byId("fresh").addEventListener("click", () => {
  views.chat.reset();
  notice.clear();
  prompt.focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});

// Tabs

function choose(name) {
  if (running) return;
  open = name;
  for (const each of Object.keys(views)) {
    const tab = byId(`tab-${each}`);
    tab.setAttribute("aria-selected", each === name);
    tab.tabIndex = each === name ? 0 : -1;
    byId(each).hidden = each !== name;
  }
  document.body.classList.toggle("racing", name === "race");
  byId("send").textContent = name === "race" ? "Race" : "Send";
  byId("fresh").hidden = name === "race";
  byId("together-row").hidden = name !== "race";
  notice.clear();
  views[name].show();
}

addEventListener("resize", () => views[open].show());
byId("figures").addEventListener("toggle", () => figures.paint());

for (const name of Object.keys(views)) {
  const tab = byId(`tab-${name}`);
  tab.addEventListener("click", () => choose(name));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = name === "chat" ? "race" : "chat";
    choose(other);
    byId(`tab-${open}`).focus();
  });
}

// Settings

byId("model").addEventListener("change", settings.showDrafters);
byId("drafter").addEventListener("change", settings.showDrafter);
byId("options").addEventListener("submit", (event) => event.preventDefault());
byId("key").value = readKey();
byId("key").addEventListener("change", () => {
  writeKey(byId("key").value.trim());
  load();
});

// Light and dark

const darkly = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (darkly.matches ? "dark" : "light")) === "dark";

function nameTheme() {
  const next = isDark() ? "Light" : "Dark";
  byId("theme").textContent = next;
  byId("theme").setAttribute("aria-label", `${next} colours`);
}

byId("theme").addEventListener("click", () => {
  const next = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  localStorage.setItem("outrider-theme", next);
  nameTheme();
});
darkly.addEventListener("change", nameTheme);

nameTheme();
offerExamples();
byId("figures").open = matchMedia("(min-width: 60.01rem)").matches;
byId("sampling").open = matchMedia("(min-width: 60.01rem) and (min-height: 60rem)").matches;
load();
if (matchMedia("(hover: hover)").matches) prompt.focus();
