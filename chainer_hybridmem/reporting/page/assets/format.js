'use strict';
/* Numbers and names of the data as text. Every number in the page is made here: the
   element says where in the data it comes from (data-path) and how it is written. */
const hybridmem = {data: JSON.parse(document.getElementById('hybridmem-data').textContent)};

(function (h) {
  // Rounds halves to even, as Python does: a half is exact only in these cases.
  h.fixed = function (value, digits) {
    const doubled = value * 2 ** (digits + 1);
    if (Number.isInteger(doubled) && doubled % 2 !== 0 && Math.abs(value) < 1e9) {
      const below = Math.floor(value * 10 ** digits);
      return ((below % 2 === 0 ? below : below + 1) / 10 ** digits).toFixed(digits);
    }
    return value.toFixed(digits);
  };

  const SIZES = [['B', 1, 0], ['KiB', 2 ** 10, 1], ['MiB', 2 ** 20, 1], ['GiB', 2 ** 30, 1],
    ['TiB', 2 ** 40, 2]];
  const TIMES = [['s', 1, 3], ['ms', 1e3, 1], ['us', 1e6, 1]];

  // The unit in which a value is written, on axes, too: its name, how many bytes it has or
  // how many of it are a second, and digits.
  h.unitOfBytes = (value) => SIZES.find(([, size]) => Math.abs(value) < 1024 * size) || SIZES[4];
  h.unitOfSeconds = (value) => (value === 0 ? TIMES[0]
    : TIMES.find(([, count]) => Math.abs(value) * count >= 1) || TIMES[2]);

  h.bytes = function (value) {
    const [unit, size, digits] = h.unitOfBytes(value);
    return `${h.fixed(value / size, digits)} ${unit}`;
  };

  h.seconds = function (value) {
    const [unit, count, digits] = h.unitOfSeconds(value);
    return `${h.fixed(value * count, digits)} ${unit}`;
  };

  h.share = function (value) {
    return (value < 0 ? '-' : '+') + h.fixed(Math.abs(value * 100), 1) + '%';
  };

  const units = {
    bytes: h.bytes,
    seconds: h.seconds,
    share: h.share,
    count: String,
    name: String,
  };

  h.look = function (path) {
    return path.split('.').reduce((value, key) => value[key], h.data);
  };

  h.element = function (tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes || {})) {
      if (key.startsWith('on')) made.addEventListener(key.slice(2), value);
      else if (value !== false && value !== null && value !== undefined) {
        made.setAttribute(key, value === true ? '' : value);
      }
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  };

  // A number of the data, or nothing known.
  h.number = function (path, unit) {
    const value = h.look(path);
    if (value === null || value === undefined) return h.element('span', {}, '–');
    const made = h.element('span', {
      class: 'number', 'data-path': path, 'data-unit': unit, title: exactly(value, unit),
    });
    made.textContent = units[unit](value);
    return made;
  };

  // All digits of what is shown rounded.
  function exactly(value, unit) {
    if (unit !== 'bytes' && unit !== 'seconds') return null;
    return `${value.toLocaleString('en', {maximumFractionDigits: 9})} ${unit}`;
  }

  // A name may break after its marks and between its words, and inside of long ones only.
  const BREAKS = /[/_:.-](?=.)|[a-z](?=[A-Z0-9])|[A-Z0-9](?=[A-Z][a-z])/g;
  const LONG = 18; // letters of a word

  h.name = function (path) {
    const text = h.look(path), pieces = [];
    const add = (word) => {
      for (let i = 0; i < word.length; i += LONG) {
        pieces.push(...(pieces.length ? [h.element('wbr')] : []), word.slice(i, i + LONG));
      }
    };
    if (text === null || text === undefined) return h.element('span', {}, '–');
    let from = 0;
    for (const {index} of text.matchAll(BREAKS)) {
      add(text.slice(from, index + 1));
      from = index + 1;
    }
    add(text.slice(from));
    return h.element('bdi', {class: 'name', 'data-path': path, 'data-unit': 'name'},
      ...pieces);
  };

  h.swatch = function (colour) {
    const made = h.element('span', {class: 'swatch', 'aria-hidden': 'true'});
    made.style.background = colour;
    return made;
  };

  // Rows are arrays of cells; cells are nodes, text or null. On a narrow screen the first
  // cell of many takes a line of its own; roles say that it is a table all the same.
  h.table = function (label, headers, rows, left = 1) {
    const cell = (tag, role) => (content, place) =>
      h.element(tag, {class: place < left ? 'left' : null, role, scope: tag === 'th' ? 'col' : null},
        ...[content].flat());
    const row = (...cells) => h.element('tr', {role: 'row'}, ...cells);
    const table = h.element('table', {
      'aria-label': label, role: 'table', class: headers.length > 3 ? 'many' : null,
    },
    h.element('thead', {role: 'rowgroup'}, row(...headers.map(cell('th', 'columnheader')))),
    h.element('tbody', {role: 'rowgroup'}, ...rows.map((cells) => row(...cells.map(cell('td', 'cell'))))));
    table.style.setProperty('--others', headers.length - 1);
    return h.element('div', {class: 'scroll'}, table);
  };
})(hybridmem);
