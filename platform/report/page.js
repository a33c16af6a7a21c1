"use strict";
(function () {
  // Share of the width within which a second curve's point belongs to the first one's.
  var NEAR = 0.03;

  function make(name, attributes, parent) {
    var made = document.createElementNS(parent.namespaceURI, name);
    Object.keys(attributes).forEach(function (key) { made.setAttribute(key, attributes[key]); });
    parent.appendChild(made);
  }

  // The nearest point of each style by x, so that the lines of two attempts count as one.
  function nearestByX(data, u) {
    var best = {};
    data.series.forEach(function (series) {
      series.points.forEach(function (point) {
        var distance = Math.abs(point[0] - u);
        var known = best[series.style];
        if (point[2] && (!known || distance < known.distance)) {
          best[series.style] = { distance: distance, point: point, series: series };
        }
      });
    });
    var found = Object.keys(best).map(function (style) { return best[style]; });
    found.sort(function (one, other) { return one.distance - other.distance; });
    return found.filter(function (hit, index) { return !index || hit.distance < NEAR; });
  }

  function nearest(data, u, v, ratio) {
    var best = null;
    data.series.forEach(function (series) {
      series.points.forEach(function (point) {
        var distance = Math.hypot((point[0] - u) * ratio, point[1] - v);
        if (point[2] && (!best || distance < best.distance)) {
          best = { distance: distance, point: point, series: series };
        }
      });
    });
    return best ? [best] : [];
  }

  function follow(plot) {
    var data = JSON.parse(plot.querySelector("script").textContent);
    var tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    plot.appendChild(tip);

    function leave() {
      tip.hidden = true;
      plot.querySelectorAll(".pointer").forEach(function (layer) { layer.textContent = ""; });
    }

    function move(event) {
      var svg = Array.prototype.find.call(plot.querySelectorAll("svg"), function (one) {
        return one.getBoundingClientRect().width > 0;
      });
      var box = svg.getBoundingClientRect();
      var scale = svg.viewBox.baseVal.width / box.width;
      var area = svg.dataset.plot.split(" ").map(Number);
      var width = area[1] - area[0], height = area[2] - area[3];
      var u = ((event.clientX - box.left) * scale - area[0]) / width;
      var v = (area[2] - (event.clientY - box.top) * scale) / height;
      leave();
      if (u < -0.02 || u > 1.02) { return; }
      var found = data.mode === "nearest" ? nearest(data, u, v, width / height) : nearestByX(data, u);
      var lines = found.map(function (hit) {
        return (data.mode === "x" && hit.series.name && found.length > 1 ? hit.series.name + "  " : "")
          + hit.point[2];
      });
      (data.segments || []).forEach(function (segment) {
        if (segment[0] <= u && u <= segment[1]) { lines.push(segment[2]); }
      });
      data.marks.forEach(function (mark) {
        if (Math.abs(mark[0] - u) * width < 5 * scale) { lines.push(mark[1]); }
      });
      if (!lines.length) { return; }
      var layer = svg.querySelector(".pointer");
      var at = found.length ? found[0].point[0] : u;
      var x = area[0] + at * width;
      if (data.mode !== "segments") {
        make("line", { x1: x, x2: x, y1: area[2], y2: area[3] }, layer);
      }
      found.forEach(function (hit) {
        if (!hit.series.style && data.mode === "x") { return; }
        make("circle", {
          cx: area[0] + hit.point[0] * width, cy: area[2] - hit.point[1] * height, r: 4.5,
          "class": hit.series.style
        }, layer);
      });
      tip.textContent = lines.slice(0, 8).join("\n");
      tip.hidden = false;
      var left = (area[0] + Math.min(1, Math.max(0, u)) * width) / scale;
      var room = plot.clientWidth - tip.offsetWidth;
      left = left + 14 > room ? left - tip.offsetWidth - 14 : left + 14;
      tip.style.left = Math.max(0, Math.min(room, left)) + "px";
      tip.style.top = Math.max(0, (event.clientY - box.top) - tip.offsetHeight - 8) + "px";
    }

    plot.addEventListener("pointermove", move);
    plot.addEventListener("pointerdown", move);
    plot.addEventListener("pointerleave", leave);
  }

  document.querySelectorAll(".plot").forEach(follow);

  document.querySelectorAll(".digest").forEach(function (code) {
    if (!navigator.clipboard) { return; }
    var button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "copy";
    button.setAttribute("aria-label", "Copy digest " + code.textContent.slice(0, 8));
    button.addEventListener("click", function () {
      navigator.clipboard.writeText(code.textContent).then(function () {
        button.textContent = "copied";
        setTimeout(function () { button.textContent = "copy"; }, 1500);
      });
    });
    code.after(button);
  });

  // What is folded would be missing on paper.
  var opened = [];
  window.addEventListener("beforeprint", function () {
    opened = Array.prototype.filter.call(document.querySelectorAll("details"), function (one) {
      return !one.open;
    });
    opened.forEach(function (one) { one.open = true; });
  });
  window.addEventListener("afterprint", function () {
    opened.forEach(function (one) { one.open = false; });
  });
})();
