// Elements, and tables that sort. Text reaches the page as text only, never as HTML.

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") made.textContent = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

const byId = (id) => document.getElementById(id);

// The number that a cell begins with, for sorting; words sort as words, and what is empty comes last.
function sortValue(text) {
  const trimmed = text.trim().replaceAll(",", "");
  if (trimmed === "") return null;
  const number = parseFloat(trimmed);
  return Number.isNaN(number) ? trimmed.toLowerCase() : number;
}

function compareValues(a, b) {
  if (typeof a === typeof b) return a < b ? -1 : a > b ? 1 : 0;
  return typeof a === "number" ? -1 : 1;
}

// What has no value stays last in both directions.
function sorted(items, valueOf, descending) {
  const sign = descending ? -1 : 1;
  return items
    .map((item, at) => [valueOf(item), at, item])
    .sort(([a, i], [b, j]) => {
      if (a === null || b === null) return (a === null) - (b === null) || i - j;
      return sign * compareValues(a, b) || i - j;
    })
    .map(([, , item]) => item);
}
