// Before anything is drawn: light or dark as the system has it, or as `#theme` was last set.
"use strict";
document.documentElement.dataset.theme = (() => {
  try {
    const kept = localStorage.getItem("podium-theme");
    if (kept === "light" || kept === "dark") return kept;
  } catch (error) { /* files have no storage in some browsers */ }
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
})();
