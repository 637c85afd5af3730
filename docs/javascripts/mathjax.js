// MathJax reads only what arithmatex marks, and again after every page change.
window.MathJax = {
  tex: { inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]], processEscapes: true },
  options: { ignoreHtmlClass: ".*|", processHtmlClass: "arithmatex" },
};

document$.subscribe(() => {
  MathJax.startup?.output?.clearCache?.();
  MathJax.typesetPromise?.();
});
