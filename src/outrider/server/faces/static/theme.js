// Runs before the page is drawn, so that a chosen colour scheme does not flash.
const chosen = localStorage.getItem("outrider-theme");
if (chosen) document.documentElement.dataset.theme = chosen;
