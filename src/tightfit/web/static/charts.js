// What all charts share: colours from the stylesheet, a size that follows the window, and a new drawing when the
// scheme changes between light and dark.

import uPlot from "/static/vendor/uplot/uPlot.esm.js";

const dark = matchMedia("(prefers-color-scheme: dark)");

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function axis(label, format, size, incrs) {
  const grid = { stroke: colour("--grid"), width: 1 };
  const made = { stroke: colour("--quiet"), grid, ticks: grid, label, labelSize: label ? 20 : 0, size };
  if (incrs) made.incrs = incrs;
  if (format) made.values = (_, values) => values.map((value) => (value === null ? "" : format(value)));
  return made;
}

/** A chart over steps. `series`: [{label, stroke: "--c1", dash, width}, …] for the columns after the steps. */
export class Chart {
  constructor(place, { series, bands, format, xLabel, range, incrs }) {
    this.place = place;
    this.given = { series, bands, format, xLabel, range, incrs };
    this.data = [[], ...series.map(() => [])];
    this.draw = this.draw.bind(this);
    dark.addEventListener("change", this.draw);
    this.watcher = new ResizeObserver(() => this.resize());
    this.watcher.observe(place);
    this.draw();
  }

  size() {
    return { width: Math.max(220, this.place.clientWidth), height: this.place.clientWidth < 420 ? 200 : 240 };
  }

  draw() {
    const { series, bands, format, xLabel, range, incrs } = this.given;
    this.plot?.destroy();
    this.plot = new uPlot(
      {
        ...this.size(),
        scales: { x: { time: false }, y: range ? { range } : {} },
        axes: [axis(xLabel, (value) => value.toLocaleString("en"), 40), axis(null, format, 78, incrs)],
        cursor: { points: { size: 6 } },
        legend: { live: true },
        series: [
          { label: xLabel, value: (_, value) => (value === null ? "–" : value.toLocaleString("en")) },
          ...series.map((each) => ({
            spanGaps: false,
            width: 1.5,
            points: { show: (plot) => plot.data[0].length < 3, size: 5 },
            value: (_, value) => (value === null || value === undefined ? "–" : format(value)),
            ...each,
            stroke: colour(each.stroke),
          })),
        ],
        bands: (bands ?? []).map((band) => ({ ...band, fill: `${colour(band.fill)}40` })),
      },
      this.data,
      this.place,
    );
    this.show(this.data);
  }

  resize() {
    const wanted = this.size();
    if (wanted.width !== this.plot.width) this.plot.setSize(wanted);
  }

  show(data) {
    this.data = data;
    this.plot.setData(data);
    // What nobody measures has no place in the legend.
    data.slice(1).forEach((values, place) => {
      const has = values.some((value) => value !== null);
      if (this.plot.series[place + 1].has !== has) {
        this.plot.series[place + 1].has = has;
        this.plot.setSeries(place + 1, { show: has });
        this.plot.root.querySelectorAll(".u-series")[place + 1].hidden = !has;
      }
    });
  }
}
