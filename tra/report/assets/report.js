// Tables that sort, and a page that loads itself again while runs go on, as it was left.

const kept = (() => {
  try {
    return JSON.parse(sessionStorage.getItem(location.pathname) ?? "{}");
  } catch {
    return {};
  }
})();

function keep() {
  try {
    sessionStorage.setItem(location.pathname, JSON.stringify(kept));
  } catch {
    // Not every browser keeps anything for a file.
  }
}

function sortTable(table, column, descending) {
  const body = table.tBodies[0];
  body.append(...sorted([...body.rows], (row) => sortValue(row.cells[column]?.textContent.replace("\u2605", "") ?? ""), descending));
  [...table.tHead.rows[0].cells].forEach((cell, at) => {
    cell.setAttribute("aria-sort", at === column ? (descending ? "descending" : "ascending") : "none");
  });
}

document.querySelectorAll("table.sortable").forEach((table, number) => {
  [...table.tHead.rows[0].cells].forEach((cell, column) => {
    const name = cell.textContent;
    cell.replaceChildren(element("button", {
      type: "button",
      text: name,
      onclick: () => {
        const [was, way] = kept[number] ?? [];
        kept[number] = [column, was === column ? !way : !cell.classList.contains("word")];
        sortTable(table, ...kept[number]);
        keep();
      },
    }));
  });
  if (kept[number]) sortTable(table, ...kept[number]);
});

const { again } = JSON.parse(byId("data").textContent);
if (again) {
  setTimeout(() => location.reload(), 1000 * again);
}
