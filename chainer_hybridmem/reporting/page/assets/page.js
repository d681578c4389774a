'use strict';
/* The page: what is looked at, and how it changes. */
(function (h) {
  const {element: e, number, name} = h, {runs} = h.data;
  const main = document.getElementById('main');
  const parts = {};
  let curve = false; // whether more than one limit has a figure

  const ends = runs.flatMap((run) => [run.moments.end_seconds,
    ...(run.measured ? [run.measured.total_seconds, ...run.measured.lanes.end_seconds] : [])]);
  const starts = runs.flatMap((run) => [0, ...(run.measured ? run.measured.lanes.start_seconds : [])]);

  h.state = {
    runs: runs.length > 1 ? [0, 1] : [0], // shown, the first one on the left
    moment: peakOf(0),
    selected: -1, // a storage
    window: null, // seconds shown; null for all
    start: starts.reduce((a, b) => Math.min(a, b), 0),
    end: ends.reduce((a, b) => Math.max(a, b), 0),
  };

  function peakOf(run) {
    const loads = runs[run].moments.load_bytes;
    return loads.reduce((best, load, i) => (load > loads[best] ? i : best), 0);
  }

  // -- changes ----------------------------------------------------------------
  h.show = function (moment) {
    const last = runs[0].moments.operation.length - 1;
    h.state.moment = Math.max(0, Math.min(last, moment));
    fill();
  };

  h.select = function (storage) {
    h.state.selected = storage;
    fill();
  };

  h.zoom = function (window) {
    const {start, end} = h.state;
    if (window) {
      const width = Math.min(Math.max(window[1] - window[0], (end - start) / 1e5), end - start);
      const first = Math.max(start, Math.min(window[0], end - width));
      window = width >= end - start ? null : [first, first + width];
    }
    h.state.window = window;
    const [min, max] = window || [Math.min(0, start), end];
    for (const chart of h.live.charts) {
      if (chart.timed) chart.plot.setScale('x', {min, max});
    }
  };

  function zoomBy(factor) {
    const [min, max] = h.state.window || [h.state.start, h.state.end];
    const at = runs[h.state.runs[0]].moments.start_seconds[h.state.moment];
    const middle = at >= min && at <= max ? at : (min + max) / 2;
    const half = (max - min) * factor / 2;
    h.zoom([middle - half, middle + half]);
  }

  const KEYS = {
    ArrowLeft: () => h.show(h.state.moment - 1),
    ArrowRight: () => h.show(h.state.moment + 1),
    PageUp: () => h.show(h.state.moment - 10),
    PageDown: () => h.show(h.state.moment + 10),
    Home: () => h.show(0),
    End: () => h.show(Infinity),
    p: () => h.show(peakOf(h.state.runs[0])),
    '+': () => zoomBy(0.5),
    '-': () => zoomBy(2),
    0: () => h.zoom(null),
    Escape: () => { h.zoom(null); h.select(-1); },
  };

  function onKey(event) {
    if (event.ctrlKey || event.altKey || event.metaKey || !KEYS[event.key]) return;
    event.preventDefault();
    KEYS[event.key]();
  }

  // -- parts ------------------------------------------------------------------
  function button(text, label, act) {
    return e('button', {type: 'button', 'aria-label': label, title: label, onclick: act}, text);
  }

  function bar() {
    parts.slider = e('input', {
      type: 'range', min: 0, max: runs[0].moments.operation.length - 1, step: 1,
      'aria-label': 'moment of the iteration',
      oninput: () => h.show(Number(parts.slider.value)),
    });
    return e('div', {class: 'bar', role: 'toolbar', 'aria-label': 'moment and zoom'},
      button('Peak', 'show the highest moment', () => h.show(peakOf(h.state.runs[0]))),
      button('◀', 'previous operation', () => h.show(h.state.moment - 1)),
      parts.slider,
      button('▶', 'next operation', () => h.show(h.state.moment + 1)),
      button('+', 'zoom in', () => zoomBy(0.5)),
      button('−', 'zoom out', () => zoomBy(2)),
      button('All', 'show the whole iteration', () => h.zoom(null)),
      parts.live);
  }

  function chooser() {
    if (runs.length < 2) return null;
    const choose = (side, label) => {
      const made = e('select', {'aria-label': label, onchange: () => {
        h.state.runs[side] = Number(made.value);
        lay();
      }}, ...runs.map((run, i) => {
        const option = e('option', {
          value: i, 'data-path': `runs.${i}.name`, 'data-unit': 'name',
        });
        option.textContent = run.name;
        return option;
      }));
      made.value = h.state.runs[side];
      return made;
    };
    return e('p', {}, choose(0, 'run on the left'), ' beside ', choose(1, 'run on the right'));
  }

  function legend(run) {
    const {groups, colours} = h.data, {lanes, measured, moments} = runs[run];
    const kinds = new Set([...lanes.kind, ...(measured ? measured.lanes.kind : [])]);
    const item = (colour, text) => e('span', {}, h.swatch(colour), text);
    return [
      e('div', {class: 'legend'}, ...groups.map((group, i) => [group, i])
        .filter(([, i]) => moments.group_bytes[i].some((bytes) => bytes > 0)).reverse()
        .map(([group]) => item(colours.groups[group], h.groupTitle(group)))),
      e('div', {class: 'legend'}, ...Object.keys(colours.kinds).filter((kind) => kinds.has(kind))
        .map((kind) => item(colours.kinds[kind], h.kindTitle(kind))),
      e('span', {}, '– – limit'), measured ? e('span', {}, '⋯ measured load; m.: measured') : null),
    ];
  }

  function runPart(run) {
    const chart = (label) => e('div', {
      class: 'chart', tabindex: 0, role: 'group', 'aria-label': label, onkeydown: onKey,
    });
    const memory = chart('Memory over time. Arrow keys move from operation to operation, plus ' +
      'and minus zoom, zero shows all, P the peak.');
    const lanes = chart('Lanes of compute and copies. Keys as above.');
    const composition = e('div', {});
    const section = e('section', {class: 'run', 'aria-label': runs[run].name},
      e('h2', {}, name(`runs.${run}.name`)), h.tiles(run), h.advice(run), memory, lanes, ...legend(run), composition,
      e('h3', {}, 'What memory costs'), h.prices(run), h.pace(run));
    return {run, section, memory, lanes, composition};
  }

  function lay() {
    h.clearCharts();
    parts.shown = h.state.runs.map(runPart);
    parts.runs.className = parts.shown.length > 1 ? 'runs two' : 'runs';
    parts.runs.replaceChildren(...parts.shown.map((part) => part.section));
    for (const part of parts.shown) {
      h.memoryChart(part.memory, part.run);
      h.laneChart(part.lanes, part.run);
    }
    if (curve) h.sweepChart(parts.sweep);
    fill();
  }

  // Everything that depends on the moment and the selected storage.
  function fill() {
    const focused = document.activeElement, again = focusPath(focused);
    parts.slider.value = h.state.moment;
    const run = h.state.runs[0], moments = runs[run].moments;
    const words = `${h.data.names[moments.name[h.state.moment]]}: ` +
      h.bytes(moments.load_bytes[h.state.moment]);
    parts.slider.setAttribute('aria-valuetext', words);
    parts.live.replaceChildren(...h.momentWords(run, h.state.moment));
    for (const part of parts.shown) part.composition.replaceChildren(h.composition(part.run));
    search();
    h.redraw();
    if (again) again();
  }

  // Tables are made anew: what had the focus gets it back.
  function focusPath(focused) {
    if (!focused || !focused.matches('.composition button, .found button')) return null;
    const box = focused.closest('.composition, .found'), kind = box.className;
    const order = [...document.getElementsByClassName(kind)].indexOf(box);
    const text = focused.textContent;
    return () => {
      const now = document.getElementsByClassName(kind)[order];
      const same = now && [...now.querySelectorAll('button')].find((b) => b.textContent === text);
      if (same) same.focus();
    };
  }

  function search() {
    parts.found.replaceChildren(h.search(parts.query.value.trim()));
  }

  function device() {
    const keys = Object.keys(h.data.profile.device);
    return keys.flatMap((key, i) => [i ? ', ' : '', `${key}: `, name(`profile.device.${key}`)]);
  }

  function build() {
    parts.runs = e('div', {});
    parts.sweep = e('div', {class: 'chart'});
    parts.live = e('p', {class: 'moment soft', 'aria-live': 'polite'});
    parts.found = e('div', {class: 'found'});
    parts.query = e('input', {type: 'search', placeholder: 'part of a name', id: 'query',
      'aria-label': 'search storages and operations', oninput: search});
    curve = h.data.bounds.length > 1;
    const blocks = [
      e('h1', {}, name('profile.name')),
      e('p', {class: 'soft'}, number('profile.operations', 'count'), ' operations, ',
        number('profile.feature_maps', 'count'), ' feature maps'),
      e('details', {}, e('summary', {}, 'Device and recording'), e('p', {}, ...device())),
      chooser(), bar(), parts.runs,
      ...(runs.length > 1 ? [e('h2', {}, 'What differs'),
        ...runs.slice(1).map((run, i) => h.differences(i + 1))] : []),
      e('h2', {}, 'Overhead against limit'),
      e('p', {class: 'soft'}, curve ? 'No plan can be in the shaded range: this is proven. ' : '',
        'The least memory of any plan is ', number('profile.least_memory_bytes', 'bytes'), '.'),
      ...(curve ? [parts.sweep,
      e('div', {class: 'legend'},
        ...runs.map((run, i) => e('span', {}, h.swatch(h.lineColour(i)), name(`runs.${i}.name`))),
        e('span', {}, '– – limit')),
      e('details', {}, e('summary', {}, 'As a table'), h.sweepTable())] : []),
      e('h2', {}, 'Figures'), h.figureTable(),
      ...(h.data.report ? [e('h2', {}, 'Report of the session'),
        e('div', {class: 'scroll'}, e('pre', {}, number('report', 'name')))] : []),
      e('h2', {}, e('label', {for: 'query'}, 'Search')), parts.query, parts.found,
    ];
    main.replaceChildren(...blocks.filter((block) => block !== null));
    document.title = `${h.data.profile.name} – hybridmem report`;
    lay();
  }

  build();
  let width = main.clientWidth;
  new ResizeObserver(() => {
    if (main.clientWidth === width) return;
    width = main.clientWidth;
    lay();
  }).observe(main);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', lay);
})(hybridmem);
