'use strict';
/* What the page says in words and tables. */
(function (h) {
  const {element: e, number, name} = h;
  const TITLES = {
    keep: 'maps to keep', 'keep for replays': 'kept for replays', swap: 'maps to swap', recompute: 'maps to recompute',
    replay: 'replay under way', workspace: 'workspace', 'other map': 'other maps',
    gradient: 'gradients', input: 'inputs', parameter: 'parameters',
    'optimizer state': 'optimizer states', rest: 'not recorded by name',
  };
  const LONGER = 0.05; // of an iteration: worth a word
  const LARGEST = 12, PRICED = 15, FOUND = 40, DIFFERING = 20;
  h.kindTitle = (kind) => h.data.titles[kind] || kind;
  h.groupTitle = (group) => TITLES[group] || group;

  const groupCell = (place) => {
    const group = h.data.groups[place];
    return [e('span', {class: 'kind'}, h.swatch(h.data.colours.groups[group]), h.groupTitle(group))];
  };

  h.storageButton = function (place) {
    return e('button', {
      type: 'button', class: 'link', 'aria-pressed': String(h.state.selected === place),
      onclick: () => h.select(h.state.selected === place ? -1 : place),
    }, name(`names.${h.data.storages.name[place]}`));
  };

  function momentButton(moment, path) {
    return e('button', {type: 'button', class: 'link', onclick: () => h.show(moment)}, name(path));
  }

  // The operation that makes a storage; none for what is there before the iteration.
  function producer(place) {
    return h.data.storages.producer[place] < 0 ? 'before'
      : number(`storages.producer.${place}`, 'count');
  }

  h.momentWords = function (run, i) {
    const base = `runs.${run}.moments`, moments = h.data.runs[run].moments;
    return [
      name(`names.${moments.name[i]}`), ` (${moments.phase[i]}, operation `,
      number(`${base}.operation.${i}`, 'count'), '): ',
      number(`${base}.load_bytes.${i}`, 'bytes'), ' at ',
      number(`${base}.start_seconds.${i}`, 'seconds'),
    ];
  };

  // -- figures ----------------------------------------------------------------
  h.tiles = function (run) {
    const base = `runs.${run}.figures`, figures = h.data.runs[run].figures;
    const tile = (title, content, ...more) => e('div', {class: 'tile'}, title, e('b', {}, content), ...more);
    const measured = (key, unit) => (figures[key] === undefined ? []
      : [e('span', {class: 'soft'}, 'measured ', number(`${base}.${key}`, unit))]);
    return e('div', {class: 'tiles'},
      tile('an iteration', number(`${base}.predicted_seconds`, 'seconds'),
        ...measured('measured_seconds', 'seconds')),
      tile('over in-core', number(`${base}.overhead`, 'share'),
        ...measured('measured_overhead', 'share')),
      tile('over the proven bound', number(`${base}.gap`, 'share')),
      tile('peak', number(`${base}.peak_bytes`, 'bytes'),
        ...measured('measured_peak_bytes', 'bytes'),
        ...(figures.whole_peak_bytes === undefined ? [] : [e('span', {class: 'soft'},
          'all iterations ', number(`${base}.whole_peak_bytes`, 'bytes'))])),
      tile('limit', number(`${base}.memory_limit_bytes`, 'bytes')),
      h.data.profile.in_core_peak_bytes === null
        ? tile('in-core peak, functions in parts',
          number('profile.in_core_peak_in_parts_bytes', 'bytes'))
        : tile('in-core peak', number('profile.in_core_peak_bytes', 'bytes')));
  };

  // What to do next.
  h.advice = function (run) {
    const {advice, figures, prices} = h.data.runs[run], base = `runs.${run}.advice`;
    if (!advice) {
      const longer = (figures.measured_overhead || 0) > figures.overhead + LONGER;
      return e('p', {class: 'advice'}, longer
        ? 'By the prediction, more memory would save nothing: what was measured takes longer for other reasons.'
        : prices.fits
        ? 'Everything fits below the limit: more memory saves nothing.'
        : figures.overhead < LONGER
          ? 'More memory would save nothing: an iteration takes what it takes in-core. What is free is room for a larger batch.'
          : 'A little more memory would save nothing.');
    }
    return e('p', {class: 'advice'}, number(`${base}.bytes`, 'bytes'), ' more would save about ',
      number(`${base}.seconds`, 'seconds'), ' an iteration, by which the proven bound falls: ',
      e('code', {}, '--memory-limit ', name(`${base}.limit`)));
  };

  h.figureTable = function () {
    const rows = [
      ['iteration', 'seconds', 'predicted_seconds', 'measured_seconds'],
      ['iteration in-core', 'seconds', 'in_core_seconds'],
      ['over in-core', 'share', 'overhead', 'measured_overhead'],
      ['proven bound of any plan', 'seconds', 'lower_bound_seconds'],
      ['gap to the bound', 'share', 'gap'],
      ['memory limit', 'bytes', 'memory_limit_bytes'],
      ['planned for', 'bytes', 'planned_limit_bytes'],
      ['peak', 'bytes', 'peak_bytes', 'measured_peak_bytes'],
      ['peak of all iterations', 'bytes', 'none', 'whole_peak_bytes'],
      ['waiting for copies', 'seconds', 'stall_seconds', 'measured_stall_seconds'],
      ['waiting for the host', 'seconds', 'host_stall_seconds'],
      ['recomputing', 'seconds', 'recompute_seconds', 'measured_recompute_seconds'],
      ['host copies in RAM', 'bytes', 'host_bytes'],
      ['host copies on disk', 'bytes', 'disk_bytes'],
      ['maps kept', 'count', 'keep_maps'], ['kept', 'bytes', 'keep_bytes'],
      ['maps swapped', 'count', 'swap_maps'], ['swapped', 'bytes', 'swap_bytes'],
      ['kept for replays alone', 'count', 'sources'], ['their size', 'bytes', 'source_bytes'],
      ['maps recomputed', 'count', 'recompute_maps'], ['recomputed', 'bytes', 'recompute_bytes'],
      ['functions in parts', 'count', 'parts', 'measured_parts'],
      ['planning', 'seconds', 'planning_seconds'], ['plans simulated', 'count', 'simulations'],
    ];
    const runs = h.data.runs.map((run, i) => i);
    const measured = runs.some((i) => h.data.runs[i].figures.measured_seconds !== undefined);
    const headers = ['', ...runs.flatMap((i) => [
      [name(`runs.${i}.name`), measured ? ', predicted' : ''],
      ...(measured ? ['measured'] : []),
    ])];
    const figure = (i, key) => h.data.runs[i].figures[key];
    // What is nothing in every run is left out.
    const told = rows.filter(([, unit, ...keys]) => unit === 'share' || unit === 'name'
      || runs.some((i) => keys.some((key) => figure(i, key))));
    return h.table('figures of all runs', headers, told.map(([title, unit, key, other]) => [
      title,
      ...runs.flatMap((i) => [
        number(`runs.${i}.figures.${key}`, unit),
        ...(measured ? [other ? number(`runs.${i}.figures.${other}`, unit) : ''] : []),
      ]),
    ]));
  };

  // -- what a moment is made of -------------------------------------------------
  h.composition = function (run) {
    const {moments, presences} = h.data.runs[run], i = h.state.moment;
    const base = `runs.${run}.moments`, operation = moments.operation[i];
    const order = h.data.groups.map((group, place) => place)
      .filter((place) => moments.group_bytes[place][i] > 0)
      .sort((a, b) => moments.group_bytes[b][i] - moments.group_bytes[a][i]);
    const rows = order.map((place) => {
      const meter = e('span', {class: 'meter', 'aria-hidden': 'true'});
      meter.style.width = `${100 * moments.group_bytes[place][i] / moments.load_bytes[i]}%`;
      meter.style.background = h.data.colours.groups[h.data.groups[place]];
      return [[...groupCell(place), meter], number(`${base}.group_bytes.${place}.${i}`, 'bytes')];
    });
    const there = presences.map((presence, place) => place)
      .filter((place) => h.isThere(presences[place], operation)).slice(0, LARGEST);
    const priced = there.some((place) => presences[place].seconds > 0);
    const largest = there.map((place) => {
      const storage = presences[place].storage;
      return [h.storageButton(storage), groupCell(presences[place].group), producer(storage),
        number(`storages.bytes.${storage}`, 'bytes'),
        ...(priced ? [presences[place].seconds > 0
          ? number(`runs.${run}.presences.${place}.seconds`, 'seconds') : '–'] : [])];
    });
    const replayed = moments.replayed[i] < 0 ? null : e('p', {},
      'A replay of ', name(`names.${moments.replayed[i]}`), ' is under way and takes ',
      number(`${base}.replay_bytes.${i}`, 'bytes'), ', workspace included.');
    return e('section', {class: 'composition', 'aria-label': 'What this moment is made of'},
      h.selection(run),
      e('h3', {}, 'What memory is made of at ', ...h.momentWords(run, i)), replayed,
      e('div', {class: h.state.runs.length > 1 ? '' : 'columns'},
        h.table('memory by kind', ['kind', 'bytes'], rows),
        h.table('largest storages at this moment',
          ['largest', 'kind', 'made by', 'bytes', ...(priced ? ['costs'] : [])], largest, 2)));
  };

  // What happens to the storage that is selected.
  h.selection = function (run) {
    const place = h.state.selected;
    if (place < 0) return null;
    const {maps} = h.data.runs[run], row = maps.findIndex((entry) => entry[0] === place);
    const words = [name(`names.${h.data.storages.name[place]}`), ', ',
      number(`storages.bytes.${place}`, 'bytes'), ', ', number(`storages.category.${place}`, 'name')];
    if (row >= 0) {
      const base = `runs.${run}.maps.${row}`, leaves = maps[row][2] >= 0;
      words.push(', ', number(`${base}.1`, 'name'), ...(leaves ? [': released before operation ',
        number(`${base}.2`, 'count'), ...(maps[row][3] >= 0
          ? [', needed before operation ', number(`${base}.3`, 'count')] : [])] : []));
    }
    return e('p', {}, 'Selected: ', ...words, '. ', e('button', {
      type: 'button', class: 'link', onclick: () => h.select(-1)}, 'Clear'));
  };

  // -- prices -------------------------------------------------------------------
  h.prices = function (run) {
    const base = `runs.${run}.prices`, {prices, presences} = h.data.runs[run];
    if (prices.fits) return e('p', {}, 'Everything fits below the limit: more memory saves nothing.');
    const bound = prices.saved_seconds > 0
      ? e('p', {}, 'With ', number(`${base}.more_bytes`, 'bytes'), ' more, the proven ' +
        'bound of any plan falls by ', number(`${base}.saved_seconds`, 'seconds'), ', from ',
      number(`${base}.bound_seconds`, 'seconds'), ' to ',
      number(`${base}.bound_with_more_seconds`, 'seconds'), '.')
      : e('p', {}, 'With ', number(`${base}.more_bytes`, 'bytes'), ' more, the proven ' +
        'bound of any plan stays at ', number(`${base}.bound_seconds`, 'seconds'), '.');
    if (!prices.operations.length) {
      return e('div', {}, bound, e('p', {}, 'Memory has no price at this limit: the bound is ' +
        'that of an iteration in which nothing waits.'));
    }
    const moments = h.data.runs[run].moments;
    const operations = prices.operations.map((row, i) => [
      momentButton(nearest(moments, row.operation), `names.${row.name}`),
      number(`${base}.operations.${i}.seconds_per_gibibyte`, 'seconds'),
    ]);
    const dear = presences.map((presence, place) => place)
      .filter((place) => presences[place].seconds > 0)
      .sort((a, b) => presences[b].seconds - presences[a].seconds).slice(0, PRICED);
    return e('div', {}, bound,
      e('p', {}, 'At the limit itself the price is ',
        number(`${base}.seconds_per_gibibyte`, 'seconds'), ' a GiB; each further one saves ' +
        'no more. Memory is short at the operations below.'),
      e('div', {class: h.state.runs.length > 1 ? '' : 'columns'},
        e('div', {}, e('h3', {}, 'Where memory is short'),
          h.table('prices by operation', ['operation', 'a GiB saves'], operations),
          e('h3', {}, 'By layer'),
          h.table('prices by layer', ['layer', 'all of it saves at most'],
            prices.layers.slice(0, PRICED).map((row, i) => [
              name(`names.${row.name}`), number(`${base}.layers.${i}.seconds`, 'seconds')]))),
        e('div', {}, e('h3', {}, 'What would lower it'),
          e('p', {class: 'soft'}, 'As much room more as this storage takes, while it is there, ' +
            'lowers the bound by at most so much: make it smaller, or run its function in parts.'),
          h.table('prices by storage', ['name', 'kind', 'made by', 'bytes', 'saves at most'], dear.map((place) => [
            h.storageButton(presences[place].storage), groupCell(presences[place].group),
            producer(presences[place].storage),
            number(`storages.bytes.${presences[place].storage}`, 'bytes'),
            number(`runs.${run}.presences.${place}.seconds`, 'seconds'),
          ]), 2))));
  };

  function nearest(moments, operation) {
    let best = 0;
    moments.operation.forEach((k, i) => {
      if (Math.abs(k - operation) < Math.abs(moments.operation[best] - operation)) best = i;
    });
    return best;
  }

  // -- what differs -------------------------------------------------------------
  h.differences = function (other) {
    const place = other - 1, found = h.data.differences[place], base = `differences.${place}`;
    const rows = found.largest.slice(0, DIFFERING).map(([storage], i) => [
      h.storageButton(storage), number(`${base}.largest.${i}.1`, 'name'),
      number(`${base}.largest.${i}.2`, 'name'), number(`storages.bytes.${storage}`, 'bytes'),
    ]);
    const titles = () => [name('runs.0.name'), name(`runs.${other}.name`)];
    return e('details', {class: 'differences', open: other === 1},
      e('summary', {}, name('runs.0.name'), ' beside ', name(`runs.${other}.name`)),
      e('p', {}, ...(found.maps
        ? [number(`${base}.maps`, 'count'), ' feature maps are treated otherwise, ',
          number(`${base}.bytes`, 'bytes'), ' in all; the largest ones:']
        : ['Both plans keep, swap and recompute the same feature maps.'])),
      e('div', {class: 'columns'},
        rows.length ? h.table('feature maps treated otherwise',
          ['feature map', ...titles(), 'bytes'], rows) : null,
        found.operations.length ? paceTable(0, base, titles()) : null));
  };

  // Operations whose times differ most, with what they wait for and replay.
  function paceTable(run, base, titles) {
    const moments = h.data.runs[run].moments;
    return h.table('operations whose times differ', ['operation', 'number', ...titles],
      h.look(base).operations.map((row, i) => [
        momentButton(nearest(moments, row.operation), `names.${row.name}`),
        number(`${base}.operations.${i}.operation`, 'count'),
        ...[0, 1].map((side) => number(`${base}.operations.${i}.seconds.${side}`, 'seconds')),
      ]));
  }

  h.pace = function (run) {
    if (!h.data.runs[run].measured) return null;
    return e('div', {}, e('h3', {}, 'Where the prediction differs'),
      e('p', {class: 'soft'}, 'Seconds from the end of the operation before, waits and replays ' +
        'included.'),
      paceTable(run, `runs.${run}.measured`, ['predicted', 'measured']));
  };

  // -- search -------------------------------------------------------------------
  h.search = function (text) {
    const wanted = text.toLowerCase(), names = h.data.names;
    const matches = (place) => names[place].toLowerCase().includes(wanted);
    const {storages} = h.data, run = h.state.runs[0], {moments, maps} = h.data.runs[run];
    const actions = new Map(maps.map((row, i) => [row[0], i]));
    const places = storages.name.map((label, place) => place)
      .filter((place) => (wanted ? matches(storages.name[place]) : actions.has(place)))
      .sort((a, b) => storages.bytes[b] - storages.bytes[a]);
    const operations = wanted ? moments.name.map((label, i) => i)
      .filter((i) => matches(moments.name[i])) : [];
    const action = (place) => (actions.has(place)
      ? number(`runs.${run}.maps.${actions.get(place)}.1`, 'name')
      : number(`storages.category.${place}`, 'name'));
    const parts = [];
    if (places.length) {
      parts.push(e('div', {}, e('h3', {}, wanted ? 'Storages' : 'Largest feature maps'),
        h.table('storages found', ['name', 'what happens', 'made by', 'bytes'],
          places.slice(0, FOUND).map((place) => [
            h.storageButton(place), action(place), producer(place),
            number(`storages.bytes.${place}`, 'bytes')]), 2)));
    }
    if (operations.length) {
      parts.push(e('div', {}, e('h3', {}, 'Operations'),
        h.table('operations found', ['operation', 'phase', 'number', 'memory'],
          operations.slice(0, FOUND).map((i) => [
            momentButton(i, `names.${moments.name[i]}`), moments.phase[i],
            number(`runs.${run}.moments.operation.${i}`, 'count'),
            number(`runs.${run}.moments.load_bytes.${i}`, 'bytes')]), 2)));
    }
    const more = places.length > FOUND || operations.length > FOUND;
    return e('div', {}, e('div', {class: 'columns'}, ...parts),
      parts.length ? null : e('p', {}, 'Nothing has this in its name.'),
      more ? e('p', {class: 'soft'}, 'There are more; type more of the name.') : null);
  };

  h.sweepTable = function () {
    const rows = [
      ...h.data.bounds.map((row, i) => ['proven bound', `bounds.${i}`]),
      ...h.data.runs.map((run, i) => [name(`runs.${i}.name`), `runs.${i}.figures`]),
    ];
    return h.table('overhead against limit', ['', 'limit', 'over in-core'], rows.map(
      ([title, base]) => [title, number(`${base}.memory_limit_bytes`, 'bytes'),
        number(`${base}.overhead`, 'share')]));
  };
})(hybridmem);
