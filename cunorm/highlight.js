// Colours cells that begin with %%cunorm as CUDA C++. JupyterLab 4 takes every cell for the kernel's language and has no
// other way than an extension to tell it; so the colours are painted over its own, by CSS custom highlights, in those of
// its theme. Elsewhere, and in browsers that have none, nothing happens.
(() => {
  if (!window.CSS?.highlights || window.cunormHighlights) return;
  const colors = {
    plain: "variable", comment: "comment", string: "string", number: "number", keyword: "keyword", meta: "meta",
  };
  const token = new RegExp([
    /(?<comment>\/\/.*)/, /(?<string>"(?:\\.|[^"\\])*")/, /(?<meta>^\s*#\s*\w+|\b__\w+)/,
    /(?<number>\b\d[\w.]*)/,
    /(?<keyword>\b(?:auto|bool|break|case|char|const|constexpr|continue|default|do|double|else|enum|extern|false|float|for|goto|if|inline|int|long|namespace|nullptr|operator|return|short|signed|sizeof|static|static_assert|static_cast|reinterpret_cast|struct|switch|template|true|typedef|typename|union|unsigned|using|void|volatile|while)\b)/,
  ].map((part) => part.source).join("|"), "g");
  const highlights = window.cunormHighlights = {};
  const style = document.head.appendChild(document.createElement("style"));
  for (const [kind, color] of Object.entries(colors)) {
    CSS.highlights.set(`cunorm-${kind}`, highlights[kind] = new Highlight());
    highlights[kind].priority = kind === "plain" ? 0 : 1;
    style.append(`::highlight(cunorm-${kind}) { color: var(--jp-mirror-editor-${color}-color); }\n`);
  }
  // From an offset in a line's text to a place in its nodes.
  const place = (line, offset) => {
    const nodes = document.createTreeWalker(line, NodeFilter.SHOW_TEXT);
    for (let node; (node = nodes.nextNode()); offset -= node.length) if (offset <= node.length) return [node, offset];
    return [line, line.childNodes.length];
  };
  const add = (kind, line, from, to) => {
    const range = new Range();
    range.setStart(...place(line, from));
    range.setEnd(...place(line, to));
    highlights[kind].add(range);
  };
  const kernels = new WeakSet();
  const paint = () => {
    Object.values(highlights).forEach((highlight) => highlight.clear());
    for (const editor of document.querySelectorAll(".jp-CodeCell .cm-content")) {
      const first = editor.firstElementChild; // a gap, where the first lines are scrolled out of sight
      if (first?.matches(".cm-line")) kernels[/^%%cunorm\b/.test(first.textContent) ? "add" : "delete"](editor);
      if (!kernels.has(editor)) continue;
      for (const line of editor.querySelectorAll(".cm-line")) {
        if (line === first) continue;
        add("plain", line, 0, line.textContent.length);
        for (const match of line.textContent.matchAll(token)) {
          const [kind] = Object.entries(match.groups).find(([, text]) => text !== undefined);
          add(kind, line, match.index, match.index + match[0].length);
        }
      }
    }
  };
  let waiting = false;
  const later = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; paint(); });
  };
  new MutationObserver(later).observe(document.body, { subtree: true, childList: true, characterData: true });
  later();
})();
