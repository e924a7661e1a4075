// Drawing: colours, small maps, and the large map of one head with tokens on its axes.

const LARGEST_SIDE = 620;

// The colour of each code: that of 0, then 255 from the smallest weight to the greatest.
function palette({ null: none, steps }) {
  const list = [none];
  const channels = steps.map((step) => [1, 3, 5].map((at) => parseInt(step.slice(at, at + 2), 16)));
  for (let code = 1; code < 256; code++) {
    const at = ((code - 1) / 254) * (steps.length - 1);
    const low = Math.min(Math.floor(at), steps.length - 2);
    const mixed = channels[low].map((value, c) => Math.round(value + (at - low) * (channels[low + 1][c] - value)));
    list.push(`rgb(${mixed.join(" ")})`);
  }
  return list;
}

const darkScheme = matchMedia("(prefers-color-scheme: dark)");

class Colours {
  constructor({ light, dark, smallest }) {
    this.smallest = smallest;
    this.light = palette(light);
    this.dark = palette(dark);
  }

  get list() { return darkScheme.matches ? this.dark : this.light; }

  // 0 for what is exactly 0, else 1 to 255 by the logarithm of the size.
  code(weight) {
    if (weight === 0) return 0;
    const share = Math.log(Math.max(Math.abs(weight), this.smallest) / this.smallest) / -Math.log(this.smallest);
    return 1 + Math.round(254 * Math.min(share, 1));
  }

  of(weight) { return this.list[this.code(weight)]; }
  onPaper(weight) { return this.light[this.code(weight)]; }
  // To be read on that colour.
  ink(code) {
    if (darkScheme.matches) return code > 120 ? "#10141b" : "#e4e8ee";
    return code > 120 ? "#ffffff" : "#1c2230";
  }
}

// Tokens as they can be seen: what is invisible, or turns the direction of text around it, is written out.
function shown(token) {
  return token
    .replaceAll("\n", "\u21b5")
    .replaceAll("\t", "\u21e5")
    .replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufffd]/g, (sign) =>
      sign === "\ufffd" ? "\u25a1" : `\u2039${sign.codePointAt(0).toString(16).padStart(4, "0")}\u203a`);
}

const shortened = (text, most = 12) => {
  const signs = [...text];
  return signs.length > most ? signs.slice(0, most - 1).join("") + "\u2026" : text;
};

// On an axis or in a sentence a space must be seen; isolated, so that right-to-left text turns nothing around it.
const onAxis = (token) => (token === " " ? "\u2423" : shown(token).trim() || "\u2423");
const inWords = (token) => `\u2068${shortened(onAxis(token), 16)}\u2069`;

function drawSmall(canvas, codes, size, colours) {
  canvas.width = canvas.height = size;
  const pen = canvas.getContext("2d");
  const list = colours.list;
  for (let query = 0; query < size; query++) {
    for (let key = 0; key <= query; key++) {
      pen.fillStyle = list[codes[query * size + key]];
      pen.fillRect(key, query, 1, 1);
    }
  }
}

class LargeMap {
  constructor(tokens, colours) {
    this.tokens = tokens.map((token) => shortened(onAxis(token)));
    this.colours = colours;
    this.cells = element("canvas", { "aria-hidden": "true" });
    this.labels = element("canvas", { "aria-hidden": "true" });
    this.marks = element("canvas", { "aria-hidden": "true" });
    this.frame = element("div", {
      class: "large-map",
      tabindex: "0",
      role: "application",
      "aria-roledescription": "attention map",
      "aria-describedby": "help",
    }, this.cells, this.labels, this.marks);
  }

  // view: { rowOf, firstQuery, firstKey, count }
  show(view) {
    this.view = view;
    this.layOut();
    this.drawCells();
  }

  layOut() {
    const width = this.frame.clientWidth || 480;
    const pen = this.marks.getContext("2d");
    const { count, firstQuery, firstKey } = this.view;
    const family = 'ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace';
    this.size = Math.max(8, Math.min(12, Math.round((0.9 * Math.min(width, LARGEST_SIDE)) / count)));
    this.font = pen.font = `${this.size}px ${family}`;
    const widest = (first) => Math.max(...this.tokens.slice(first, first + count).map((t) => pen.measureText(t).width));
    this.left = Math.ceil(widest(firstQuery)) + 12;
    this.top = Math.ceil(widest(firstKey)) + 12;
    // A whole number of the screen's own dots, or seams would show between cells.
    const ratio = window.devicePixelRatio || 1;
    const room = Math.min(width - this.left - 4, LARGEST_SIDE);
    this.cell = Math.max(2, Math.floor(Math.min(28, room / count) * ratio) / ratio);
    this.every = Math.ceil((this.size - 1) / this.cell); // labels that would run into each other are left out
    this.side = this.cell * count;
    this.width = this.left + this.side + 4;
    this.height = this.top + this.side + 4;
    this.frame.style.height = `${this.height}px`;
    for (const canvas of [this.cells, this.labels, this.marks]) {
      canvas.width = Math.round(this.width * ratio);
      canvas.height = Math.round(this.height * ratio);
      canvas.style.width = `${this.width}px`;
      canvas.style.height = `${this.height}px`;
      canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    }
  }

  *visibleCells() {
    const { rowOf, firstQuery, firstKey, count } = this.view;
    for (let query = firstQuery; query < firstQuery + count; query++) {
      const { weights } = rowOf(query);
      for (let key = firstKey; key <= Math.min(query, firstKey + count - 1); key++) {
        yield [query, key, weights[key]];
      }
    }
  }

  at(query, key) {
    return [
      this.left + (key - this.view.firstKey) * this.cell,
      this.top + (query - this.view.firstQuery) * this.cell,
    ];
  }

  drawCells() {
    const pen = this.cells.getContext("2d");
    pen.clearRect(0, 0, this.width, this.height);
    pen.fillStyle = getComputedStyle(this.frame).getPropertyValue("--later");
    pen.fillRect(this.left, this.top, this.side, this.side);
    const list = this.colours.list;
    for (const [query, key, weight] of this.visibleCells()) {
      pen.fillStyle = list[this.colours.code(weight)];
      pen.fillRect(this.left + (key - this.view.firstKey) * this.cell, this.top + (query - this.view.firstQuery) * this.cell, this.cell, this.cell);
    }
  }

  // The tokens along the axes; those that the query gives some weight are bold.
  label(query) {
    const pen = this.labels.getContext("2d");
    const style = getComputedStyle(this.frame);
    const [quiet, ink, accent] = ["--quiet", "--ink", "--accent"].map((name) => style.getPropertyValue(name));
    const { firstQuery, firstKey, count, rowOf } = this.view;
    pen.clearRect(0, 0, this.width, this.height);
    const row = query === null ? null : rowOf(query).weights;
    pen.font = this.font;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    for (let at = 0; at < count; at++) {
      const own = firstQuery + at === query;
      if (at % this.every && !own) continue;
      pen.fillStyle = own ? accent : quiet;
      pen.font = own ? `bold ${this.font}` : this.font;
      pen.fillText(this.tokens[firstQuery + at], this.left - 6, this.top + (at + 0.5) * this.cell);
    }
    pen.textAlign = "left";
    for (let at = 0; at < count; at++) {
      if (at % this.every) continue;
      const weight = row && firstKey + at <= query ? row[firstKey + at] : 0;
      pen.save();
      pen.translate(this.left + (at + 0.5) * this.cell, this.top - 6);
      pen.rotate(-Math.PI / 2);
      pen.fillStyle = weight !== 0 ? ink : quiet;
      pen.font = weight !== 0 ? `bold ${this.font}` : this.font;
      pen.globalAlpha = row && weight === 0 ? 0.55 : 1;
      pen.fillText(this.tokens[firstKey + at], 0, 0);
      pen.restore();
    }
  }

  // The row and key that are looked at.
  mark(query, key) {
    const pen = this.marks.getContext("2d");
    const { firstQuery, firstKey, count } = this.view;
    pen.clearRect(0, 0, this.width, this.height);
    pen.strokeStyle = getComputedStyle(this.frame).getPropertyValue("--accent");
    pen.lineWidth = 2;
    if (query >= firstQuery && query < firstQuery + count && query >= firstKey) {
      const [x, y] = this.at(query, firstKey);
      pen.strokeRect(x, y, Math.min(query - firstKey + 1, count) * this.cell, this.cell);
      if (key !== null && key >= firstKey && key < firstKey + count && key <= query) {
        const [left, top] = this.at(query, key);
        pen.strokeRect(left, top, this.cell, this.cell);
        pen.lineWidth = 0.75; // beside the column: a tint would make white look like a weight
        pen.strokeRect(left, this.top, this.cell, this.side);
      }
    }
  }

  // The query and key under the pointer; null outside.
  under(event) {
    const box = this.frame.getBoundingClientRect();
    const key = this.view.firstKey + Math.floor((event.clientX - box.left - this.left) / this.cell);
    const query = this.view.firstQuery + Math.floor((event.clientY - box.top - this.top) / this.cell);
    const { firstQuery, firstKey, count } = this.view;
    const inside = query >= firstQuery && query < firstQuery + count && key < firstKey + count;
    return inside ? { query, key: key >= firstKey && key <= query ? key : null } : null;
  }

  // The same as a picture of its own, on white, with a legend.
  svg(title) {
    const space = "http://www.w3.org/2000/svg";
    const make = (name, attributes, text) => {
      const made = document.createElementNS(space, name);
      for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
      if (text !== undefined) made.textContent = text;
      return made;
    };
    const round = (x) => Math.round(x * 100) / 100;
    const height = this.height + 64;
    const width = Math.max(this.width, 300);
    const svg = make("svg", { xmlns: space, width, height, viewBox: `0 0 ${width} ${height}` });
    svg.append(make("rect", { width, height, fill: "#ffffff" }));
    svg.append(make("text", { x: 8, y: 16, "font-family": "sans-serif", "font-size": 12, "font-weight": "bold" }, title));
    const map = make("g", { transform: "translate(0 22)" });
    const { firstQuery, firstKey, count } = this.view;
    const corner = this.at(firstQuery, firstKey);
    const future = make("g", { fill: "#eceeea" });
    for (let query = firstQuery; query < firstQuery + count; query++) {
      const from = Math.max(query + 1, firstKey);
      const cells = firstKey + count - from;
      if (cells > 0) {
        const [x, y] = this.at(query, from);
        future.append(make("rect", { x: round(x), y: round(y), width: round(cells * this.cell), height: round(this.cell) }));
      }
    }
    map.append(future);
    const cells = make("g", { "shape-rendering": "crispEdges" });
    for (const [query, key, weight] of this.visibleCells()) {
      if (weight === 0) continue;
      const [x, y] = this.at(query, key);
      const size = round(this.cell);
      cells.append(make("rect", { x: round(x), y: round(y), width: size, height: size, fill: this.colours.onPaper(weight) }));
    }
    map.append(cells);
    map.append(make("rect", {
      x: corner[0], y: corner[1], width: this.side, height: this.side, fill: "none", stroke: "#9aa0a6", "stroke-width": 0.75,
    }));
    const labels = make("g", { "font-family": "monospace", "font-size": this.size, fill: "#1c2230" });
    for (let at = 0; at < count; at += this.every) {
      const y = round(this.top + (at + 0.5) * this.cell);
      const x = round(this.left + (at + 0.5) * this.cell);
      labels.append(
        make("text", { x: this.left - 6, y, "text-anchor": "end", "dominant-baseline": "central" }, this.tokens[firstQuery + at]),
        make("text", { transform: `translate(${x} ${this.top - 6}) rotate(-90)`, "dominant-baseline": "central" }, this.tokens[firstKey + at]),
      );
    }
    map.append(labels);
    svg.append(map, this.svgLegend(make, height - 34));
    return svg;
  }

  svgLegend(make, y) {
    const legend = make("g", { "font-family": "sans-serif", "font-size": 10, fill: "#1c2230" });
    legend.append(make("rect", { x: 8, y, width: 14, height: 12, fill: "#ffffff", stroke: "#9aa0a6" }));
    legend.append(make("text", { x: 26, y: y + 10 }, "exactly 0"));
    for (let at = 0; at < 48; at++) {
      const weight = this.colours.smallest ** (1 - at / 47);
      legend.append(make("rect", { x: 86 + at * 3, y, width: 3.2, height: 12, fill: this.colours.onPaper(weight) }));
    }
    legend.append(make("text", { x: 86, y: y + 24 }, `\u2264 ${this.colours.smallest}`));
    legend.append(make("text", { x: 230, y: y + 24, "text-anchor": "end" }, "1"));
    legend.append(make("text", { x: 236, y: y + 10 }, "weight"));
    return legend;
  }
}
