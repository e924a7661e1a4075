// The explorer: what is looked at, how it is chosen, and what of it is shown where.

const WINDOW = 64; // tokens along the edge of a large map
const MOST_LINKS = 80;
const FEW_LINKS = 12; // of a long text while the pointer moves
const MOST_KEYS = 100; // rows in the table of keys
const SHORT = 256; // tokens of a text for which everything is shown at once
const RESTING = 90; // milliseconds after which a pointer rests

const data = JSON.parse(byId("data").textContent);
const read = reader(decoded(byId("arrays").textContent));
const tokens = data.tokens;
const length = tokens.length;
const count = Math.min(length, WINDOW);
const colours = new Colours(data.colours);
const models = data.models.map(({ label, layers }) => ({
  label,
  layers: layers.map((packed) => new Layer(packed, length, read)),
}));

const state = {
  heads: models.map(() => [0, 0]), // the layer and head of each model
  query: length - 1,
  key: null,
  firstQuery: 0,
  firstKey: 0,
  follow: true,
  pinned: false,
  sort: "layer",
  descending: false,
  keySort: "weight",
  keyDescending: true,
};

// Numbers as they are read: 0 is said to be exact, and what is tiny is not said to be 0.
function weightText(weight) {
  if (weight === 0) return "0";
  const size = Math.abs(weight);
  return size >= 1e-3 ? weight.toFixed(4) : weight.toExponential(1);
}
const fixed = (value, digits) => (Math.abs(value) < 10 ** -digits / 2 && value !== 0 ? value.toExponential(1) : value.toFixed(digits));
function percent(share) {
  if (share > 0 && share < 5e-4) return "<0.1%";
  return `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;
}
const plural = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;

const SUMMARIES = {
  layer: { title: "layer and head", value: (head) => head.layer * 1000 + head.head, text: () => "" },
  kept: { title: "keys kept", value: (head) => head.kept, text: (head) => percent(head.kept) },
  null: { title: "null queries", value: (head) => head.null, text: (head) => percent(head.null) },
  mean_distance: {
    title: "mean distance",
    value: (head) => head.mean_distance,
    text: (head) => head.mean_distance.toFixed(1),
  },
  reach: { title: "reach", value: (head) => head.reach, text: (head) => head.reach.toLocaleString("en") },
  gate: {
    title: "gate (median)",
    value: (head) => (head.gate ? head.gate[1] : null),
    text: (head) => (head.gate ? head.gate[1].toFixed(3) : ""),
  },
};
const hasGates = models.some((model) => model.layers.some((layer) => layer.gates));
if (!hasGates) delete SUMMARIES.gate;

function headsOf(model) {
  const all = model.layers.flatMap((layer, at) => layer.heads.map((summary, head) => ({ at, head, summary, layer })));
  return sorted(all, (one) => SUMMARIES[state.sort].value(one.summary), state.descending);
}

const chosen = (m) => {
  const [at, head] = state.heads[m];
  return { layer: models[m].layers[at], at, head, summary: models[m].layers[at].heads[head] };
};

// ---- the heads

function choose(m, at, head) {
  state.heads[m] = [at, head];
  refresh();
}

function showHeads() {
  byId("sort").value = state.sort;
  byId("direction").textContent = state.descending ? "descending" : "ascending";
  byId("direction").setAttribute("aria-pressed", String(state.descending));
  models.forEach((model, m) => {
    const grid = byId(`small-${m}`);
    const focused = document.activeElement?.dataset?.place;
    const inGrid = grid.contains(document.activeElement);
    const heads = model.layers[0].heads.length;
    grid.style.gridTemplateColumns = state.sort === "layer" && heads <= 12 ? `repeat(${heads}, auto)` : "";
    grid.replaceChildren(...headsOf(model).map((one) => smallMap(m, one)));
    if (inGrid) grid.querySelector(`[data-place="${focused}"]`)?.focus();
  });
  showSummaries();
}

const pictures = new Map();

function smallMap(m, { at, head, summary, layer }) {
  const place = `${m}.${at}.${head}`;
  if (!pictures.has(place)) {
    const canvas = element("canvas", { "aria-hidden": "true" });
    const size = Math.min(length, Math.round(Math.sqrt(layer.small.length / layer.heads.length)));
    drawSmall(canvas, layer.small.subarray(head * size * size, (head + 1) * size * size), size, colours);
    pictures.set(place, canvas);
  }
  const picked = state.heads[m][0] === at && state.heads[m][1] === head;
  const value = state.sort === "layer" ? SUMMARIES.kept.text(summary) : SUMMARIES[state.sort].text(summary);
  return element(
    "button",
    {
      type: "button",
      class: "small-map",
      "data-place": place,
      "aria-pressed": String(picked),
      "aria-label": `layer ${summary.layer}, head ${summary.head}: ${summarySentence(summary)}`,
      onclick: () => choose(m, at, head),
    },
    pictures.get(place),
    element("span", {}, element("b", { text: `${summary.layer}\u00b7${summary.head}` }), ` ${value}`),
  );
}

function summarySentence(summary) {
  const gate = summary.gate ? `, median gate ${summary.gate[1].toFixed(2)}` : "";
  const none = summary.null > 0 ? `, ${percent(summary.null)} of queries attend to nothing` : "";
  return `keeps ${percent(summary.kept)} of keys${none}, reach ${plural(summary.reach, "token")}${gate}`;
}

function showSummaries() {
  const several = models.length > 1;
  const columns = Object.entries(SUMMARIES).filter(([name]) => name !== "layer");
  const heading = (name, title) =>
    element(
      "th",
      { scope: "col", "aria-sort": state.sort === name ? (state.descending ? "descending" : "ascending") : "none" },
      element("button", { type: "button", "data-sort": name, text: title, onclick: () => sortBy(name) }),
    );
  const rows = sorted(
    models.flatMap((model, m) => headsOf(model).map((one) => ({ m, ...one }))),
    (one) => SUMMARIES[state.sort].value(one.summary),
    state.descending,
  );
  byId("summaries").replaceChildren(
    element("thead", {}, element("tr", {},
      ...(several ? [element("th", { scope: "col", class: "word", text: "model" })] : []),
      heading("layer", "layer\u00b7head"),
      ...columns.map(([name, { title }]) => heading(name, title)),
    )),
    element("tbody", {}, ...rows.map(({ m, at, head, summary }) => element("tr", {},
      ...(several ? [element("td", { class: "word", text: models[m].label })] : []),
      element("td", {}, element("button", {
        type: "button", class: "link", text: `${summary.layer}\u00b7${summary.head}`, onclick: () => choose(m, at, head),
      })),
      ...columns.map(([, { text }]) => element("td", { text: text(summary) })),
    ))),
  );
}

// The greatest first, but layers as they follow each other; chosen again, the other way round.
function sortBy(name) {
  state.descending = state.sort === name ? !state.descending : name !== "layer";
  state.sort = name;
  refresh();
}

// ---- one head, large

const views = models.map((model, m) => buildView(model, m));

function buildView(model, m) {
  const map = new LargeMap(tokens, colours);
  const view = {
    map,
    title: element("h2"),
    about: element("p", { class: "quiet" }),
    query: element("p", { class: "query" }),
    text: element("div", { class: "text", role: "listbox", "aria-label": `Text, as ${model.label} reads it` }),
    links: document.createElementNS("http://www.w3.org/2000/svg", "svg"),
    keys: element("table", { class: "numbers keys" }),
    more: element("p", { class: "quiet" }),
    painted: new Int16Array(length).fill(-2), // the colour of each token, as it is on the page
    asking: null,
    places: null, // of tokens in the text; forgotten when the page is laid out anew
  };
  view.links.classList.add("links");
  view.links.setAttribute("aria-hidden", "true");
  const words = element("div", { class: "words", role: "presentation" });
  view.tokens = tokens.map((token, at) => {
    const made = element("span", { class: "token", role: "option", dir: "auto", tabindex: "-1", "data-at": at, "aria-selected": "false", text: shown(token) });
    words.append(made);
    if (token.includes("\n")) words.append(element("br"));
    return made;
  });
  view.text.append(words, view.links);
  const tokenAt = (event) => event.target.closest?.(".token")?.dataset.at;
  view.text.addEventListener("scroll", () => { if (view.places && view.row) paint(view, view.row, view.text.scrollTop); });
  view.text.addEventListener("pointerover", (event) => hover(tokenAt(event), null));
  view.text.addEventListener("click", (event) => pin(tokenAt(event)));
  view.text.addEventListener("focusin", (event) => look(Number(tokenAt(event) ?? state.query), null));
  view.text.addEventListener("keydown", (event) => step(event, { ArrowLeft: -1, ArrowRight: 1 }, () => view.tokens[state.query].focus()));
  map.frame.addEventListener("pointermove", (event) => pointed(map, m, event));
  map.frame.addEventListener("pointerleave", () => { byId("tip").hidden = true; });
  map.frame.addEventListener("click", (event) => { const at = map.under(event); if (at) pin(at.query, at.key); });
  map.frame.addEventListener("keydown", (event) => {
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const from = state.key ?? state.query + 1;
      look(state.query, Math.max(0, Math.min(state.query, from + (event.key === "ArrowLeft" ? -1 : 1))));
      event.preventDefault();
    } else {
      step(event, { ArrowUp: -1, ArrowDown: 1 });
    }
  });
  byId("large").append(
    element("article", { class: "panel model", "aria-label": model.label },
      element("div", { class: "map-side" }, view.title, view.about, map.frame),
      element("div", { class: "row-side" }, view.query, view.text, element("div", { class: "scroll keys-frame" }, view.keys), view.more),
    ),
  );
  return view;
}

// Move the query by a key of the keyboard.
function step(event, arrows, then = () => {}) {
  const by = { ...arrows, PageUp: -count, PageDown: count, Home: -length, End: length }[event.key];
  if (by === undefined) return;
  event.preventDefault();
  look(Math.max(0, Math.min(length - 1, state.query + by)), null);
  then();
}

// A pointer may move many times in one frame: the first is followed at once, of the others the last in the next frame.
let following = false;
let wanted = null;
function hover(query, key) {
  if (query === undefined || state.pinned) return;
  wanted = [Number(query), key];
  if (!following) follow();
}

function follow() {
  const [query, key] = wanted;
  wanted = null;
  following = true;
  if (query !== state.query || key !== state.key) look(query, key);
  requestAnimationFrame(() => {
    following = false;
    if (wanted && !state.pinned) follow();
  });
}

function pin(query, key = null) {
  if (query === undefined) return;
  state.pinned = !(state.pinned && state.query === Number(query) && state.key === key);
  look(Number(query), key);
}

function look(query, key) {
  state.query = query;
  state.key = key;
  const before = [state.firstQuery, state.firstKey];
  if (query < state.firstQuery) moveTo(query);
  if (query >= state.firstQuery + count) moveTo(query - count + 1);
  if (key !== null && key < state.firstKey) state.firstKey = key;
  if (key !== null && key >= state.firstKey + count) state.firstKey = key - count + 1;
  if (before[0] !== state.firstQuery || before[1] !== state.firstKey) showMaps();
  showRow();
  remember();
}

function moveTo(first) {
  state.firstQuery = Math.max(0, Math.min(length - count, first));
  if (state.follow) state.firstKey = state.firstQuery;
}

function showMaps() {
  byId("first-query").value = state.firstQuery;
  byId("first-key").value = state.firstKey;
  byId("first-query-shown").textContent = (state.firstQuery + 1).toLocaleString("en");
  byId("first-key-shown").textContent = (state.firstKey + 1).toLocaleString("en");
  byId("follow").checked = state.follow;
  views.forEach((view, m) => {
    const { layer, head, summary } = chosen(m);
    view.title.textContent = titleOf(m);
    view.about.textContent = `This head ${summarySentence(summary)}.`;
    view.map.frame.setAttribute("aria-label", `${titleOf(m)}: weights of keys, across, for each query, down`);
    view.map.show({ rowOf: (query) => layer.row(head, query), firstQuery: state.firstQuery, firstKey: state.firstKey, count });
  });
}

function titleOf(m) {
  const { summary } = chosen(m);
  return `${models[m].label} \u00b7 layer ${summary.layer}, head ${summary.head}`;
}

// ---- one row

function showRow() {
  // Whatever is read of the layout is read before anything is written, or the browser would lay the page out twice.
  for (const view of views) if (!view.places) measure(view);
  const scrolled = views.map((view) => view.text.scrollTop);
  const said = views.map((view, m) => {
    const { layer, head } = chosen(m);
    const row = layer.row(head, state.query);
    view.map.mark(state.query, state.key);
    clearTimeout(view.later);
    if (length <= SHORT) showRest(view, layer, head, row);
    else view.later = setTimeout(() => showRest(view, layer, head, row), RESTING);
    const sentence = describe(layer, head, row);
    view.query.replaceChildren(
      element("b", { text: `Query ${state.query + 1} ` }),
      element("bdi", { class: "chip", text: shortened(onAxis(tokens[state.query]), 16) }),
      ` ${sentence}`,
      ...(state.pinned ? [element("span", { class: "pin", text: " pinned, Esc releases" })] : []),
    );
    showText(view, row, scrolled[m]);
    const key = state.key === null ? "" : ` Key ${inWords(tokens[state.key])}: ${details(layer, head, row, state.key).join(", ")}.`;
    return `${models.length > 1 ? `${models[m].label}: ` : ""}query ${state.query + 1}, ${inWords(tokens[state.query])}, ${sentence}${key}`;
  });
  say(said.join(" "));
}

let speaking = 0;
function say(text) {
  clearTimeout(speaking);
  speaking = setTimeout(() => { byId("said").textContent = text; }, 120);
}

function describe(layer, head, row) {
  const number = row.weights.reduce((sum, weight) => sum + (weight !== 0), 0);
  const gate = layer.gate(head, state.query);
  const gated = gate === null ? "" : `, gate ${gate.toFixed(3)}`;
  if (number === 0) return `attends to nothing: all ${plural(row.weights.length, "key")} have a weight of exactly 0${gated}.`;
  const strongest = row.weights.reduce((best, weight, key) => (Math.abs(weight) > Math.abs(row.weights[best]) ? key : best), row.weights.length - 1);
  const kept = layer.keepsSome(head) ? `keeps ${number} of ${plural(row.weights.length, "key")}` : `sees ${plural(row.weights.length, "key")}`;
  return `${kept}, gives most to ${inWords(tokens[strongest])} ${back(strongest)}: ${weightText(row.weights[strongest])}${gated}.`;
}

const back = (key) => (key === state.query ? "(itself)" : `(${plural(state.query - key, "token")} back)`);

// What is known of one key, as words.
function details(layer, head, row, key) {
  const found = [];
  if (row.scores) found.push(`score ${fixed(row.scores[key], 3)}`);
  if (layer.keepsSome(head)) found.push(row.kept[key] ? "kept" : "not kept");
  if (row.distance && row.kept[key]) found.push(`contextual distance ${row.distance[key]}`);
  found.push(`${plural(row.weights.length - 1 - key, "token")} back`);
  const gate = layer.gate(head, key);
  if (gate !== null) found.push(`gate ${gate.toFixed(3)}`);
  found.push(row.weights[key] === 0 ? "weight exactly 0" : `weight ${weightText(row.weights[key])}`);
  return found;
}

// Only what is seen and changes is touched: of thousands of tokens few are, and a query changes few of them.
function paint(view, row, scrolled) {
  const list = colours.list;
  for (let at = firstSeen(view, scrolled); at < length; at++) {
    if (view.places[at][1] > scrolled + 1.25 * view.height) break;
    const code = at > state.query ? -1 : colours.code(row.weights[at]);
    if (view.painted[at] === code) continue;
    view.painted[at] = code;
    const token = view.tokens[at];
    token.className = `token${code === -1 ? " future" : code === 0 ? " null" : ""}`;
    token.style.backgroundColor = code === -1 ? "" : list[code];
    token.style.color = code === -1 ? "" : colours.ink(code);
  }
}

// The first token that is not far above what is seen; tokens lie in lines, from top to bottom.
function firstSeen(view, scrolled) {
  let low = 0;
  let high = length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (view.places[middle][1] < scrolled - 0.25 * view.height) low = middle + 1;
    else high = middle;
  }
  return low;
}

function showText(view, row, scrolled) {
  view.row = row;
  paint(view, row, scrolled);
  const asking = view.tokens[state.query];
  if (view.asking !== asking) {
    if (view.asking) {
      view.asking.tabIndex = -1;
      view.asking.setAttribute("aria-selected", "false");
    }
    view.asking = asking;
    asking.tabIndex = 0;
    asking.setAttribute("aria-selected", "true");
  }
  if (length > SHORT) drawLinks(view, row, FEW_LINKS);
  const [, top, height] = view.places[state.query];
  const hidden = top < scrolled || top + height > scrolled + view.height;
  if (hidden && !view.text.matches(":hover")) {
    view.text.scrollTop = top - view.height / 2;
    paint(view, row, top - view.height / 2);
  }
}

function measure(view) {
  view.places = view.tokens.map((token) => [token.offsetLeft + token.offsetWidth / 2, token.offsetTop, token.offsetHeight]);
  view.height = view.text.clientHeight;
  view.links.setAttribute("width", view.text.scrollWidth);
  view.links.setAttribute("height", view.text.scrollHeight);
}

function drawLinks(view, row, most) {
  const make = (name, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };
  const keys = [...row.weights.keys()].filter((key) => row.weights[key] !== 0 && key !== state.query);
  keys.sort((a, b) => Math.abs(row.weights[b]) - Math.abs(row.weights[a]));
  const [toX, toY] = view.places[state.query];
  view.links.replaceChildren(...keys.slice(0, most).reverse().map((key) => {
    const [x, y] = view.places[key];
    const share = colours.code(row.weights[key]) / 255;
    const lift = Math.min(y, toY) - Math.min(14, 7 + Math.abs(toX - x) / 24);
    return make("path", {
      d: `M${x} ${y}C${x} ${lift} ${toX} ${lift} ${toX} ${toY}`,
      fill: "none",
      stroke: colours.of(row.weights[key]),
      "stroke-width": 0.6 + 2.2 * share,
      "stroke-opacity": 0.35 + 0.6 * share,
      class: key === state.key ? "picked" : "",
      "data-key": key,
    });
  }));
}

const KEY_COLUMNS = {
  token: { title: "key", word: true, value: (_, key) => key, text: (_, key) => onAxis(tokens[key]) },
  weight: { title: "weight", value: ({ row }, key) => Math.abs(row.weights[key]), text: ({ row }, key) => weightText(row.weights[key]) },
  score: { title: "score", has: ({ row }) => row.scores, value: ({ row }, key) => row.scores[key], text: ({ row }, key) => fixed(row.scores[key], 4) },
  kept: { title: "kept", word: true, has: ({ layer, head }) => layer.keepsSome(head), value: ({ row }, key) => row.kept[key], text: ({ row }, key) => (row.kept[key] ? "kept" : "not kept") },
  distance: { title: "distance", has: ({ row }) => row.distance, value: ({ row }, key) => (row.kept[key] ? row.distance[key] : null), text: ({ row }, key) => (row.kept[key] ? row.distance[key].toLocaleString("en") : "") },
  back: { title: "tokens back", value: (_, key) => state.query - key, text: (_, key) => (state.query - key).toLocaleString("en") },
  gate: { title: "gate", has: ({ layer }) => layer.gates, value: ({ layer, head }, key) => layer.gate(head, key), text: ({ layer, head }, key) => layer.gate(head, key).toFixed(4) },
};

// What takes longer than a frame: with a long text it waits until the pointer rests.
function showRest(view, layer, head, row) {
  view.map.label(state.query);
  if (!view.places) measure(view);
  drawLinks(view, row, MOST_LINKS);
  showKeys(view, layer, head, row);
}

function showKeys(view, layer, head, row) {
  const about = { layer, head, row };
  const columns = Object.entries(KEY_COLUMNS).filter(([, column]) => !column.has || column.has(about));
  const by = KEY_COLUMNS[state.keySort].has?.(about) === null ? KEY_COLUMNS.weight : KEY_COLUMNS[state.keySort];
  const keys = sorted([...row.weights.keys()].reverse(), (key) => by.value(about, key), state.keyDescending);
  const direction = state.keyDescending ? "descending" : "ascending";
  view.keys.replaceChildren(
    element("thead", {}, element("tr", {}, ...columns.map(([name, { title, word }]) => element(
      "th",
      { scope: "col", class: word ? "word" : null, "aria-sort": state.keySort === name ? direction : "none" },
      element("button", { type: "button", "data-sort": name, text: title, onclick: () => sortKeysBy(name) }),
    )))),
    element("tbody", {}, ...keys.slice(0, MOST_KEYS).map((key) => element(
      "tr",
      { "data-key": key, class: [row.weights[key] === 0 ? "null" : "", key === state.key ? "picked" : ""].join(" ") },
      ...columns.map(([name, { word, text }]) => {
        const cell = element("td", { class: [word ? "word" : "", `of-${name}`].join(" ") });
        const said = text(about, key);
        if (name === "token") cell.append(swatch(row.weights[key]), element("bdi", { text: shortened(said, 24) }));
        else cell.textContent = said;
        return cell;
      }),
    ))),
  );
  const rest = keys.length - MOST_KEYS;
  view.more.textContent = rest > 0 ? `and ${plural(rest, "key")} more` : "";
}

function swatch(weight) {
  const made = element("i", { class: "swatch" });
  made.style.backgroundColor = colours.of(weight);
  return made;
}

function sortKeysBy(name) {
  if (state.keySort === name) state.keyDescending = !state.keyDescending;
  else { state.keySort = name; state.keyDescending = name !== "token" && name !== "back"; }
  showRow();
}

function pointed(map, m, event) {
  const at = map.under(event);
  const tip = byId("tip");
  if (!at) { tip.hidden = true; return; }
  hover(at.query, at.key);
  const { layer, head } = chosen(m);
  tip.hidden = at.key === null || (state.pinned && at.query !== state.query);
  if (tip.hidden) return;
  tip.replaceChildren(
    element("b", { text: `${inWords(tokens[at.query])} \u2192 ${inWords(tokens[at.key])}` }),
    ...details(layer, head, layer.row(head, at.query), at.key).map((line) => element("div", { text: line })),
  );
  const left = Math.min(event.clientX + 16, window.innerWidth - tip.offsetWidth - 8);
  const top = Math.min(event.clientY + 16, window.innerHeight - tip.offsetHeight - 8);
  tip.style.transform = `translate(${left}px, ${top}px)`;
}

// ---- links to a view

let remembering = 0;
function remember() {
  clearTimeout(remembering);
  if (length <= SHORT) writeAddress();
  else remembering = setTimeout(writeAddress, RESTING);
}

function writeAddress() {
  const said = {
    heads: state.heads.map(([at, head]) => `${at + 1}.${head + 1}`).join(","),
    query: state.query + 1,
    ...(state.key === null ? {} : { key: state.key + 1 }),
    ...(state.pinned ? { pinned: 1 } : {}),
    ...(length > count ? { from: state.firstQuery + 1, keys: state.firstKey + 1 } : {}),
    ...(state.sort === "layer" && !state.descending ? {} : { sort: state.sort, order: state.descending ? "descending" : "ascending" }),
  };
  try {
    history.replaceState(null, "", `#${new URLSearchParams(said)}`);
  } catch {
    // A frame without an address of its own, as in a notebook.
  }
}

// What is not understood is left as it is: a link may be of another page.
function recall() {
  const said = new URLSearchParams(location.hash.slice(1));
  const whole = (name, most) => {
    const number = Number(said.get(name));
    return Number.isInteger(number) && number >= 1 && number <= most ? number - 1 : null;
  };
  (said.get("heads") ?? "").split(",").slice(0, models.length).forEach((text, m) => {
    const [at, head] = text.split(".").map((part) => Number(part) - 1);
    if (models[m].layers[at]?.heads[head]) state.heads[m] = [at, head];
  });
  state.query = whole("query", length) ?? state.query;
  state.key = whole("key", state.query + 1);
  state.pinned = said.has("pinned");
  moveTo(whole("from", length) ?? Math.max(0, state.query - count + 1));
  const keys = whole("keys", length - count + 1);
  if (keys !== null && keys !== state.firstKey) { state.firstKey = keys; state.follow = false; }
  if (Object.hasOwn(SUMMARIES, said.get("sort") ?? "")) state.sort = said.get("sort");
  state.descending = said.get("order") === "descending";
}

async function copyLink() {
  writeAddress();
  try {
    await navigator.clipboard.writeText(location.href);
    notify("The link is copied.");
  } catch {
    window.prompt("The link to this view:", location.href);
  }
}

function notify(text) {
  say(text);
  const button = byId("copy-link");
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy link"; }, 1500);
}

// ---- saving

// The large maps beside each other.
function picture() {
  const parts = views.map((view, m) => view.map.svg(titleOf(m)));
  const width = parts.reduce((sum, part) => sum + Number(part.getAttribute("width")), 0);
  const height = Math.max(...parts.map((part) => Number(part.getAttribute("height"))));
  const whole = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [key, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` })) whole.setAttribute(key, value);
  let x = 0;
  for (const part of parts) {
    part.setAttribute("x", x);
    x += Number(part.getAttribute("width"));
    whole.append(part);
  }
  return { text: new XMLSerializer().serializeToString(whole), width, height };
}

function download(blob, name) {
  const link = element("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function saveSvg() {
  download(new Blob([picture().text], { type: "image/svg+xml" }), "attention.svg");
}

async function savePng() {
  const { text, width, height } = picture();
  const image = new Image();
  image.src = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
  await image.decode();
  const canvas = element("canvas");
  canvas.width = 2 * width;
  canvas.height = 2 * height;
  canvas.getContext("2d").drawImage(image, 0, 0, 2 * width, 2 * height);
  URL.revokeObjectURL(image.src);
  canvas.toBlob((blob) => download(blob, "attention.png"));
}

// ---- the whole

function showLegend() {
  const ramp = element("canvas", { width: 160, height: 1, "aria-hidden": "true", class: "ramp" });
  const pen = ramp.getContext("2d");
  for (let x = 0; x < 160; x++) {
    pen.fillStyle = colours.of(colours.smallest ** (1 - x / 159));
    pen.fillRect(x, 0, 1, 1);
  }
  const sample = (kind, text) => element("span", {}, element("i", { class: `swatch ${kind}` }), text);
  byId("legend").replaceChildren(
    sample("null", `${darkScheme.matches ? "the page's dark" : "white"}: exactly 0`),
    element("span", {}, "weight ", element("small", { text: `\u2264 ${colours.smallest}` }), ramp, element("small", { text: "1" })),
    sample("later", "cannot be seen"),
  );
}

function aboutPage() {
  byId("title").textContent = `Attention of ${models.map((model) => model.label).join(" beside ")}`;
  const layers = models.flatMap((model) => model.layers);
  const error = Math.max(...layers.map((layer) => layer.error));
  const others = layers.reduce((sum, layer) => sum + layer.others, 0);
  const but = others > 0 ? `, but for ${others} ${others === 1 ? "query" : "queries"} with a score at the threshold` : "";
  const precision = error > 0 ? `weights within ${error.toExponential(0)} of the library's${but}` : "weights as the library computes them";
  byId("about").textContent = `${plural(length, "token")}, ${precision}; tra ${data.tra}`;
}

function refresh() {
  showHeads();
  showMaps();
  showRow();
  remember();
}

function begin() {
  models.forEach((model, m) => byId("small-maps").append(
    element("div", { class: "panel heads" }, element("h3", { text: model.label }), element("div", { id: `small-${m}`, class: "small-grid" })),
  ));
  byId("large").classList.toggle("two", models.length > 1);
  byId("small-maps").classList.toggle("two", models.length > 1);
  byId("heads-body").classList.toggle("one", models.length === 1);
  byId("numbers").open = models.length === 1 && window.innerWidth > 990;
  for (const [name, { title }] of Object.entries(SUMMARIES)) byId("sort").append(element("option", { value: name, text: title }));
  byId("sort").addEventListener("change", (event) => sortBy(event.target.value));
  byId("direction").addEventListener("click", () => { state.descending = !state.descending; refresh(); });
  byId("copy-link").addEventListener("click", copyLink);
  byId("save-svg").addEventListener("click", saveSvg);
  byId("save-png").addEventListener("click", savePng);
  byId("position").hidden = length <= count;
  for (const id of ["first-query", "first-key"]) byId(id).max = length - count;
  byId("first-query").addEventListener("input", (event) => {
    moveTo(Number(event.target.value));
    if (!state.pinned) state.query = Math.max(state.firstQuery, Math.min(state.query, state.firstQuery + count - 1));
    state.key = null;
    showMaps(); showRow(); remember();
  });
  byId("first-key").addEventListener("input", (event) => {
    state.follow = false;
    state.firstKey = Number(event.target.value);
    showMaps(); showRow(); remember();
  });
  byId("follow").addEventListener("change", (event) => {
    state.follow = event.target.checked;
    moveTo(state.firstQuery);
    showMaps(); showRow(); remember();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && state.pinned) { state.pinned = false; look(state.query, state.key); }
  });
  window.addEventListener("hashchange", () => { recall(); refresh(); });
  window.addEventListener("resize", () => {
    for (const view of views) {
      view.places = null;
      view.links.setAttribute("width", 0);
      view.links.setAttribute("height", 0);
    }
    showMaps();
    showRow();
  });
  darkScheme.addEventListener("change", () => {
    pictures.clear();
    for (const view of views) view.painted.fill(-2);
    showLegend();
    refresh();
  });
  showLegend();
  aboutPage();
  recall();
  refresh();
}

begin();

// For scripts: the numbers behind what is shown, all counted from 0, and where a large map's cells lie in its frame.
window.explorer = {
  tokens,
  row: (m, at, head, query) => models[m].layers[at].row(head, query),
  place: (m) => [views[m].map.left, views[m].map.top, views[m].map.cell],
};
