// Colours cells that begin with %%cunorm as CUDA C++. JupyterLab 4 takes every cell for Python where the kernel is, and
// only an extension of it could tell otherwise. So the colours of its theme are painted over those that it chose, with
// CSS custom highlights. Where a browser has none, or the page is another's, nothing happens.
(() => {
  if (!window.CSS?.highlights || window.cunormHighlights) return;
  const keywords =
    "alignas auto bool break case char const constexpr continue default do double else enum extern false float for " +
    "if inline int long namespace nullptr operator return short signed sizeof static static_assert static_cast " +
    "struct switch template true typedef typename union unsigned using void volatile while";
  const kinds = {
    comment: /\/\/.*/,
    string: /"(?:\\.|[^"\\])*"/,
    meta: /^\s*#\s*\w+|\b__\w+/,
    number: /\b\d[\w.]*/,
    keyword: new RegExp(`\\b(?:${keywords.replaceAll(" ", "|")})\\b`),
  };
  const token = new RegExp(Object.entries(kinds).map(([kind, { source }]) => `(?<${kind}>${source})`).join("|"), "g");
  const highlights = (window.cunormHighlights = {});
  const style = document.head.appendChild(document.createElement("style"));
  style.append(".cunorm-kernel .cm-line span { font-style: normal !important; font-weight: normal !important; }\n");
  ["variable", ...Object.keys(kinds)].forEach((kind, priority) => {
    highlights[kind] = Object.assign(new Highlight(), { priority });
    CSS.highlights.set(`cunorm-${kind}`, highlights[kind]);
    style.append(`::highlight(cunorm-${kind}) { color: var(--jp-mirror-editor-${kind}-color); }\n`);
  });

  const add = (kind, line, from, to) => {
    const place = (offset) => {
      const nodes = document.createTreeWalker(line, NodeFilter.SHOW_TEXT);
      for (let node = nodes.nextNode(); node; offset -= node.length, node = nodes.nextNode()) {
        if (offset <= node.length) return [node, offset];
      }
      return [line, line.childNodes.length];
    };
    const range = new Range();
    range.setStart(...place(from));
    range.setEnd(...place(to));
    highlights[kind].add(range);
  };
  const paint = () => {
    Object.values(highlights).forEach((highlight) => highlight.clear());
    for (const cell of document.querySelectorAll(".jp-CodeCell")) {
      // Of a long cell only the lines in sight are in the page, so it may be known from before what the first one says.
      const first = cell.querySelector(".cm-content > .cm-line:first-child");
      if (first) cell.classList.toggle("cunorm-kernel", /^%%cunorm\b/.test(first.textContent));
      if (!cell.matches(".cunorm-kernel")) continue;
      for (const line of cell.querySelectorAll(".cm-line")) {
        if (line === first) continue;
        add("variable", line, 0, line.textContent.length);
        for (const { 0: text, index, groups } of line.textContent.matchAll(token)) {
          add(Object.keys(groups).find((kind) => groups[kind]), line, index, index + text.length);
        }
      }
    }
  };
  let waiting = false;
  const later = () => {
    if (!waiting) requestAnimationFrame(() => { waiting = false; paint(); });
    waiting = true;
  };
  new MutationObserver(later).observe(document.body, { subtree: true, childList: true, characterData: true });
  later();
})();
