'use strict';
/* Three pictures on uPlot: memory over time, lanes below it, overhead against limit. */
(function (h) {
  const LANES = [['compute', 'compute'], ['d2h', 'swap-out'], ['h2d', 'swap-in']];
  const KIND_ROWS = {compute: 0, d2h: 1, h2d: 2};
  const ROW_PIXELS = 30;
  const PERCENTS = [0, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000];
  const TITLE_PIXELS = 18; // of an axis
  const KEY = 'moments'; // of charts whose cursors move together
  const charts = [];

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const axisPixels = (box) => (box.clientWidth < 480 ? 72 : 78);

  h.live = {charts};
  h.LAST_LABEL_PIXELS = 36; // half of the widest label below the right end of an axis

  h.clearCharts = function () {
    for (const chart of charts.splice(0)) chart.plot.destroy();
  };

  h.redraw = function () {
    for (const chart of charts) chart.plot.redraw(false, false);
  };

  h.resize = function () {
    for (const chart of charts) {
      chart.plot.setSize({width: chart.box.clientWidth, height: chart.height});
    }
  };

  // Steps of an axis of bytes: round numbers of its unit.
  function byteSteps(size) {
    const least = size === 1 ? 1 : 1 / 1000, steps = [];
    for (let power = least; power <= 1000; power *= 10) {
      for (const step of [1, 2, 5]) steps.push(step * power * size);
    }
    return steps;
  }

  const near = (value) => Math.abs(value - Math.round(value)) < 1e-6;

  // Labels in one unit, with as many digits as their step wants.
  const labels = (inUnit) => function (plot, splits) {
    const step = splits.length > 1 ? inUnit(splits[1] - splits[0]) : inUnit(splits[0] || 0);
    let digits = 0;
    while (digits < 9 && !near(step * 10 ** digits)) digits += 1;
    return splits.map((value) => inUnit(value).toFixed(digits));
  };

  // An axis says what it shows in its title, and the unit of all its labels.
  const titled = (title) => ({label: title, labelSize: TITLE_PIXELS, labelGap: 0,
    labelFont: '12px system-ui, sans-serif'});

  // The unit is that in which the page writes the largest value.
  function byteAxis(title, most, more) {
    const [unit, size] = h.unitOfBytes(most);
    return axis({...titled(`${title}, ${unit}`), values: labels((value) => value / size),
      incrs: byteSteps(size), ...more});
  }

  function timeAxis() {
    const [unit, count] = h.unitOfSeconds(h.state.end);
    return axis({...titled(`time, ${unit}`), values: labels((value) => value * count),
      space: 70, size: 30});
  }

  function axis(more) {
    return {
      stroke: () => colour('--soft'),
      grid: {stroke: () => colour('--grid'), width: 1},
      ticks: {stroke: () => colour('--line'), width: 1, size: 5},
      font: '12px system-ui, sans-serif',
      ...more,
    };
  }

  function clipped(plot, paint) {
    const {ctx, bbox} = plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    paint(ctx);
    ctx.restore();
  }

  // Makes a chart in a box: tooltips, clicks, keys and zooming are alike everywhere.
  function make(box, height, options, data, tell, click) {
    const tip = h.element('div', {class: 'tip', hidden: true, role: 'tooltip'});
    const plot = new uPlot({
      width: Math.max(box.clientWidth, 200),
      height,
      legend: {show: false},
      padding: [10, h.LAST_LABEL_PIXELS, 0, 0],
      ...options,
      hooks: {
        ...options.hooks,
        setCursor: [(self) => {
          const inside = self.cursor.left >= 0 && box.matches(':hover');
          const content = inside ? tell(self) : null;
          tip.hidden = !content;
          if (!content) return;
          tip.replaceChildren(...content);
          const over = self.over, left = over.offsetLeft + self.cursor.left;
          const right = left > box.clientWidth / 2;
          tip.style.left = right ? 'auto' : `${left + 14}px`;
          tip.style.right = right ? `${box.clientWidth - left + 14}px` : 'auto';
          tip.style.top = `${over.offsetTop + 8}px`;
        }],
      },
    }, data, box);
    box.append(tip);
    plot.over.addEventListener('click', () => click(plot));
    plot.over.addEventListener('dblclick', () => h.zoom(null));
    charts.push({plot, box, height, timed: data.timed});
    return plot;
  }

  const timed = (data) => Object.assign(data, {timed: true});

  function timeScale(end) {
    return {time: false, range: () => h.state.window || [Math.min(0, h.state.start), end]};
  }

  function timeOptions(box, end) {
    return {
      cursor: {
        sync: {key: KEY, scales: ['x', null]},
        drag: {x: true, y: false, setScale: false},
        y: false,
        points: {show: false},
      },
      scales: {x: timeScale(end)},
    };
  }

  // What was dragged over becomes the window of all charts.
  function zoomed(plot) {
    const {left, width} = plot.select;
    if (width < 5) return;
    const window = [plot.posToVal(left, 'x'), plot.posToVal(left + width, 'x')];
    plot.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
    h.zoom(window);
  }

  h.momentAt = function (run, seconds) {
    const starts = run.moments.start_seconds;
    let low = 0, high = starts.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (starts[middle] <= seconds) low = middle;
      else high = middle - 1;
    }
    return low;
  };

  // Where the selected storage is, and the moment that is looked at.
  function marks(plot, run) {
    clipped(plot, (ctx) => {
      const {top, height} = plot.bbox;
      const {start_seconds: starts, end_seconds: end, operation} = run.moments;
      if (h.state.selected >= 0) {
        ctx.fillStyle = 'rgba(214, 69, 69, 0.20)';
        for (const presence of run.presences) {
          if (presence.storage !== h.state.selected) continue;
          for (let i = 0, first; i < operation.length; i += 1) {
            if (!h.isThere(presence, operation[i])) continue;
            for (first = i; i < operation.length && h.isThere(presence, operation[i]);) i += 1;
            const left = plot.valToPos(starts[first], 'x', true);
            const right = plot.valToPos(i < starts.length ? starts[i] : end, 'x', true);
            ctx.fillRect(left, top, Math.max(right - left, 1), height);
          }
        }
      }
      const x = Math.round(plot.valToPos(starts[h.state.moment], 'x', true));
      ctx.fillStyle = colour('--mark');
      ctx.fillRect(x, top, Math.max(1, Math.round(devicePixelRatio)), height);
    });
  }

  // Of all runs that are shown: their pictures have one scale.
  function highest() {
    return Math.max(...h.state.runs.map((number) => h.data.runs[number].figures).flatMap(
      (found) => [found.peak_bytes, found.memory_limit_bytes, found.measured_peak_bytes || 0]));
  }

  h.memoryChart = function (box, number) {
    const run = h.data.runs[number], moments = run.moments;
    const groups = h.data.groups;
    const xs = [...moments.start_seconds, moments.end_seconds];
    const sums = new Array(xs.length).fill(0);
    const stacks = groups.map((group, place) => {
      moments.group_bytes[place].forEach((bytes, i) => { sums[i] += bytes; });
      sums[xs.length - 1] = sums[xs.length - 2];
      return sums.slice();
    });
    const stepped = uPlot.paths.stepped({align: 1});
    const series = groups.map((group) => ({
      label: group, paths: stepped, points: {show: false}, width: 0,
      fill: h.data.colours.groups[group], stroke: h.data.colours.groups[group],
    })).reverse(); // the tallest first: the others are painted over it
    const options = timeOptions(box, h.state.end);
    options.scales.y = {range: () => [0, 1.08 * highest()]};
    options.axes = [
      timeAxis(),
      byteAxis('memory', highest(), {size: axisPixels(box) - TITLE_PIXELS}),
    ];
    options.series = [{}, ...series];
    options.hooks = {
      setSelect: [zoomed],
      draw: [(plot) => { outline(plot, run); marks(plot, run); }],
    };
    const tell = (plot) => {
      const i = h.momentAt(run, plot.posToVal(plot.cursor.left, 'x'));
      return h.momentWords(number, i);
    };
    const click = (plot) => h.show(h.momentAt(run, plot.posToVal(plot.cursor.left, 'x')));
    return make(box, 280 + TITLE_PIXELS, options, timed([xs, ...stacks.reverse()]), tell, click);
  };

  // Predicted load, measured load and limit as lines over the stack.
  function outline(plot, run) {
    const {moments, measured, figures} = run;
    clipped(plot, (ctx) => {
      const steps = (starts, loads, end, style, width, dash) => {
        ctx.beginPath();
        ctx.strokeStyle = style;
        ctx.lineWidth = width * devicePixelRatio;
        ctx.setLineDash(dash.map((n) => n * devicePixelRatio));
        starts.forEach((start, i) => {
          const x = plot.valToPos(start, 'x', true), y = plot.valToPos(loads[i], 'y', true);
          const next = i + 1 < starts.length ? starts[i + 1] : end;
          ctx.lineTo(x, y);
          ctx.lineTo(plot.valToPos(next, 'x', true), y);
        });
        ctx.stroke();
      };
      steps(moments.start_seconds, moments.load_bytes, moments.end_seconds, colour('--soft'), 1, []);
      if (measured && measured.start_seconds.length) {
        steps(measured.start_seconds, measured.load_bytes, measured.total_seconds,
          colour('--dash'), 1.5, [2, 3]);
      }
      const limit = figures.memory_limit_bytes;
      steps([plot.scales.x.min], [limit], plot.scales.x.max, colour('--alarm'), 1.5, [7, 4]);
    });
  }

  // Lanes of a prediction and, below them, of what was measured.
  h.laneChart = function (box, number) {
    const run = h.data.runs[number];
    const parts = [run.lanes, ...(run.measured ? [run.measured.lanes] : [])];
    const rows = parts.length * LANES.length;
    const options = timeOptions(box, h.state.end);
    options.scales.y = {range: () => [0, rows]};
    const titles = parts.flatMap((part, place) =>
      LANES.map(([, title]) => (place ? `${title} m.` : title)));
    options.axes = [
      timeAxis(),
      axis({
        splits: () => titles.map((title, row) => rows - row - 0.5),
        values: () => titles, size: axisPixels(box), grid: {show: false}, ticks: {show: false},
        font: `${box.clientWidth < 480 ? 10 : 11}px system-ui, sans-serif`,
      }),
    ];
    options.series = [{}, {show: false}];
    options.hooks = {
      setSelect: [zoomed],
      draw: [(plot) => {
        parts.forEach((part, place) => spans(plot, part, place * LANES.length, rows));
        marks(plot, run);
      }],
    };
    const tell = (plot) => {
      const found = spanAt(plot, parts, rows);
      return found && spanWords(number, ...found);
    };
    const click = (plot) => {
      const found = spanAt(plot, parts, rows);
      if (found && parts[found[0]].storage[found[1]] >= 0) {
        h.select(parts[found[0]].storage[found[1]]);
      }
      h.show(h.momentAt(run, plot.posToVal(plot.cursor.left, 'x')));
    };
    return make(box, rows * ROW_PIXELS + 40 + TITLE_PIXELS, options,
      timed([[0, h.state.end], [null, null]]), tell, click);
  };

  function spans(plot, part, first, rows) {
    clipped(plot, (ctx) => {
      const {min, max} = plot.scales.x;
      const unit = plot.bbox.height / rows;
      part.start_seconds.forEach((start, i) => {
        const end = part.end_seconds[i];
        if (end < min || start > max) return;
        const kind = part.kind[i], row = first + KIND_ROWS[part.lane[i]];
        const left = plot.valToPos(start, 'x', true);
        const width = Math.max(plot.valToPos(end, 'x', true) - left, 1);
        // A stall or replay may lie inside an operation: it is narrower, and on top.
        const inset = kind === 'stall' ? 0.3 : 0.12;
        const top = plot.bbox.top + (row + inset) * unit, height = (1 - 2 * inset) * unit;
        ctx.fillStyle = h.data.colours.kinds[kind];
        ctx.fillRect(left, top, width, height);
        if (h.state.selected >= 0 && part.storage[i] === h.state.selected) {
          ctx.strokeStyle = colour('--mark');
          ctx.lineWidth = 2 * devicePixelRatio;
          ctx.strokeRect(left, top, Math.max(width, 3), height);
        }
      });
    });
  }

  // The part and place of the narrowest span under the cursor, some pixels around it.
  function spanAt(plot, parts, rows) {
    const row = Math.floor(plot.cursor.top / (plot.over.clientHeight / rows));
    const place = Math.floor(row / LANES.length);
    const part = parts[place];
    if (!part) return null;
    const slack = plot.posToVal(3, 'x') - plot.posToVal(0, 'x');
    const at = plot.posToVal(plot.cursor.left, 'x');
    let best = null, narrowest = Infinity;
    part.start_seconds.forEach((start, i) => {
      const end = part.end_seconds[i];
      if (KIND_ROWS[part.lane[i]] !== row % LANES.length) return;
      if (start - slack > at || end + slack < at || end - start >= narrowest) return;
      best = [place, i];
      narrowest = end - start;
    });
    return best;
  }

  function spanWords(number, place, i) {
    const base = `runs.${number}.${place ? 'measured.lanes' : 'lanes'}`;
    const part = h.look(base);
    const several = part.count[i] > 1;
    return [
      h.swatch(h.data.colours.kinds[part.kind[i]]), part.kind[i], ' ',
      h.name(`names.${part.name[i]}`),
      several ? ' and others: ' : '', several ? h.number(`${base}.count.${i}`, 'count') : '',
      h.element('br'), 'from ', h.number(`${base}.start_seconds.${i}`, 'seconds'),
      ' to ', h.number(`${base}.end_seconds.${i}`, 'seconds'),
    ];
  }

  h.isThere = function (presence, operation) {
    for (let i = 0; i < presence.stays.length; i += 2) {
      if (presence.stays[i] <= operation && operation < presence.stays[i + 1]) return true;
    }
    return false;
  };

  h.sweepChart = function (box) {
    const {bounds} = h.data;
    const places = new Set(bounds.map((row) => row.memory_limit_bytes));
    h.data.runs.forEach((run) => places.add(run.figures.memory_limit_bytes));
    const xs = [...places].sort((a, b) => a - b);
    const column = (rows, value) => {
      const known = new Map(rows.map((row) => [row.memory_limit_bytes, value(row)]));
      return xs.map((x) => (known.has(x) ? known.get(x) : null));
    };
    const percent = (row) => (row.overhead === null ? null : 100 * row.overhead);
    const data = [xs, column(bounds, percent)];
    const series = [{}, {
      label: 'bound', stroke: () => colour('--soft'), width: 1.5, dash: [4, 3], spanGaps: true,
      paths: uPlot.paths.stepped({align: -1}), fill: 'rgba(128, 138, 150, 0.25)',
      points: {show: false},
    }];
    h.data.runs.forEach((run, i) => {
      data.push(column([run.figures], percent));
      series.push({label: run.name, stroke: h.lineColour(i), width: 0,
        points: {show: true, size: 12, width: 2, fill: h.lineColour(i)}});
    });
    const all = data.slice(1).flat().filter((value) => value !== null);
    const lowest = Math.min(0, ...all), top = Math.max(1, 1.3 * Math.max(...all));
    const options = {
      cursor: {drag: {x: false, y: false}, points: {show: false}, y: false},
      scales: {
        x: {time: false},
        // From nothing to several times: linear up to a percent, then logarithmic.
        y: {distr: 4, asinh: 1,
          range: () => [lowest, top]},
      },
      axes: [
        byteAxis('memory limit', xs[xs.length - 1], {space: 80, size: 30}),
        axis({
          ...titled('time over in-core'),
          splits: (self, i, min, max) => PERCENTS.filter((v) => v >= min && v <= max),
          values: (self, splits) => splits.map((v) => `${v}%`),
          size: axisPixels(box) - TITLE_PIXELS,
          filter: (self, splits) => splits,
        }),
      ],
      series,
    };
    options.hooks = {draw: [(plot) => clipped(plot, (ctx) => {
      ctx.strokeStyle = colour('--alarm');
      ctx.lineWidth = devicePixelRatio;
      ctx.setLineDash([7 * devicePixelRatio, 4 * devicePixelRatio]);
      for (const run of h.data.runs) {
        const x = plot.valToPos(run.figures.memory_limit_bytes, 'x', true);
        ctx.beginPath();
        ctx.moveTo(x, plot.bbox.top);
        ctx.lineTo(x, plot.bbox.top + plot.bbox.height);
        ctx.stroke();
      }
    })]};
    const tell = (plot) => limitWords(xs[plot.cursor.idx]);
    return make(box, 260 + TITLE_PIXELS, options, data, tell, () => null);
  };

  // What is known at the limit nearest to the cursor.
  function limitWords(limit) {
    const rows = [
      ...h.data.bounds.map((row, i) => [row, ['proven bound'], `bounds.${i}`]),
      ...h.data.runs.map((run, i) => [run.figures, h.name(`runs.${i}.name`), `runs.${i}.figures`]),
    ].filter(([row]) => row.memory_limit_bytes === limit);
    if (!rows.length) return null;
    return ['limit ', h.number(`${rows[0][2]}.memory_limit_bytes`, 'bytes'),
      ...rows.flatMap(([, title, base]) => [h.element('br'), ...[title].flat(), ' ',
        h.number(`${base}.overhead`, 'share')])];
  }

  h.lineColour = (place) => h.data.colours.lines[place % h.data.colours.lines.length];
})(hybridmem);
