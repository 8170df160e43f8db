// Formulas are set by the KaTeX that lies beside this file: nothing is fetched from elsewhere.
function setFormulas() {
  for (const element of document.querySelectorAll(".arithmatex")) {
    const text = element.textContent.trim();
    const display = text.startsWith("\\[");
    katex.render(text.slice(2, -2), element, { displayMode: display, throwOnError: false, strict: "ignore" });
  }
}
if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", setFormulas);
else setFormulas();
