// Tooltips at points, arrow keys along curves.
// The page is complete without this script, which loads and stores nothing.
"use strict";
{
  const all = (where, what) => [...where.querySelectorAll(what)];
  const make = (name, more) => Object.assign(document.createElement(name), more);
  const visible = element => element.getClientRects().length > 0;

  // --- copy -------------------------------------------------------------------------------------------------------
  for (const code of navigator.clipboard ? all(document, "pre > code") : []) {
    const button = make("button", { type: "button", className: "copy", textContent: "Copy" });
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    });
    code.parentNode.prepend(button);
  }

  // --- tips -------------------------------------------------------------------------------------------------------
  const NEAR = 24; // pixels from a point at which it is pointed at: wide enough for a finger
  const tip = make("div", { className: "tip", hidden: true });
  document.body.append(tip);

  const addTip = (point, text) => {
    point.dataset.tip = text;
    point.setAttribute("aria-label", text);
    point.setAttribute("role", "img");
    point.setAttribute("tabindex", "-1"); // one stop for a whole figure, see below
    point.closest("svg").setAttribute("role", "group"); // its parts can be reached
  };
  // Browsers would show the titles as well.
  for (const title of all(document, "svg title")) {
    addTip(title.parentNode, title.textContent);
    title.remove();
  }

  const middle = element => {
    const box = element.getBoundingClientRect();
    return [box.x + box.width / 2, box.y + box.height / 2];
  };

  const show = point => {
    for (const point of all(document, ".pointed")) point.classList.remove("pointed");
    tip.hidden = !point;
    if (!point) return;
    point.classList.add("pointed");
    tip.textContent = point.dataset.tip;
    const [x, y] = middle(point), box = tip.getBoundingClientRect(), wide = document.documentElement.clientWidth;
    tip.style.left = `${scrollX + Math.max(8, Math.min(x - box.width / 2, wide - box.width - 8))}px`;
    tip.style.top = `${scrollY + (y - box.height - 12 > 0 ? y - box.height - 12 : y + 16)}px`;
  };

  const pointedAt = event => {
    const under = event.target.closest?.("[data-tip]");
    if (under) return under;
    const chart = event.target.closest?.("svg.chart");
    const near = chart ? all(chart, "use[data-tip]").filter(visible) : [];
    const away = near.map(point => Math.hypot(...middle(point).map((at, k) => at - [event.clientX, event.clientY][k])));
    const least = Math.min(...away);
    return least <= NEAR ? near[away.indexOf(least)] : null;
  };
  for (const kind of ["pointermove", "pointerdown"]) document.addEventListener(kind, event => show(pointedAt(event)));
  document.addEventListener("scroll", () => show(null), true);

  // --- arrow keys: left and right along a curve, up and down to another one, Home and End to its ends -----------------
  const curvesOf = figure =>
    all(figure, "svg g.line, svg g.dots, svg g.cells")
      .map(curve => all(curve, "[data-tip]").filter(visible))
      .filter(curve => curve.length);

  const walk = (figure, event) => {
    const curves = curvesOf(figure), last = list => list.length - 1;
    const row = curves.findIndex(curve => curve.includes(document.activeElement));
    const column = row < 0 ? -1 : curves[row].indexOf(document.activeElement);
    const clamp = (at, list) => Math.max(0, Math.min(at, last(list)));
    const to = {
      ArrowRight: () => (row < 0 ? [0, 0] : [row, column + 1]),
      ArrowLeft: () => (row < 0 ? [0, 0] : [row, column - 1]),
      ArrowDown: () => [row + 1, Math.max(column, 0)],
      ArrowUp: () => [row < 0 ? last(curves) : row - 1, Math.max(column, 0)],
      Home: () => [Math.max(row, 0), 0],
      End: () => [Math.max(row, 0), Infinity],
    }[event.key]?.();
    if (!to || !curves.length) return;
    event.preventDefault();
    const curve = curves[clamp(to[0], curves)];
    curve[clamp(to[1], curve)].focus();
  };

  for (const figure of all(document, "figure")) {
    if (!figure.querySelector("[data-tip]")) continue;
    figure.tabIndex = 0;
    figure.setAttribute("role", "group");
    figure.setAttribute("aria-label", "Figure: arrow keys walk along its curves");
    figure.addEventListener("keydown", event => walk(figure, event));
  }
  document.addEventListener("focusin", event => show(event.target.closest("[data-tip]")));
  document.addEventListener("focusout", () => show(null));
  document.addEventListener("keydown", event => event.key === "Escape" && show(null));

  // --- tables that continue to the right fade out there -----------------------------------------------------------
  for (const box of all(document, ".scroll")) {
    const fade = () => box.toggleAttribute("data-more", box.scrollWidth - box.clientWidth - box.scrollLeft > 1);
    box.addEventListener("scroll", fade);
    new ResizeObserver(fade).observe(box);
  }
}
