"use strict";
// Shows the values of a chart under the pointer. The page is complete without it.
const SVG = "http://www.w3.org/2000/svg";

function parsed(words) {
  return words.split(" ").map(Number);
}

function nearest(places, wanted) {
  let low = 0, high = places.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (places[middle] < wanted) low = middle; else high = middle;
  }
  return wanted - places[low] < places[high] - wanted ? low : high;
}

function follow(figure) {
  const svg = figure.querySelector("svg[role=img]"), readout = figure.querySelector(".readout");
  const [left, right, low, high] = ["left", "right", "low", "high"].map((name) => Number(svg.dataset[name]));
  const lines = [...svg.querySelectorAll(".line")].map((path) => (
    { name: path.dataset.name, places: parsed(path.dataset.x), values: parsed(path.dataset.y) }
  ));
  const cursor = document.createElementNS(SVG, "line");
  for (const [name, value] of [["class", "cursor"], ["y1", 26], ["y2", 230], ["visibility", "hidden"]]) cursor.setAttribute(name, value);
  svg.append(cursor);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = Math.min(Math.max((event.clientX - box.left) / box.width * svg.viewBox.baseVal.width, left), right);
    const wanted = low + (x - left) / (right - left) * (high - low);
    const found = lines.map((line) => {
      const index = nearest(line.places, wanted);
      const place = Math.round(line.places[index]), away = place === Math.round(wanted) ? "" : ` at ${place.toLocaleString("en")}`;
      return `${line.name} ${line.values[index]}${away}`;
    });
    for (const name of ["x1", "x2"]) cursor.setAttribute(name, x);
    cursor.setAttribute("visibility", "visible");
    readout.textContent = `${svg.dataset.along} ${Math.round(wanted).toLocaleString("en")}: ${found.join(", ")}`;
  });
  svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    readout.textContent = "";
  });
}

document.querySelectorAll("figure.chart").forEach(follow);
