"""PyTorch's execution traces (``ExecutionTraceObserver``; Chakra's JSON before it).

A trace has a node for each call with the tensors that it reads and gives, each with its
storage. What is counted:

- An operation is an outermost call that has a schema, with everything inside it.
  Backward is what the autograd engine runs. Of several iterations the last whole one
  counts; an optimizer's calls are its update.
- Numbers of storages are used again after a free. A call that gives a storage which it
  has not been given has made a new one.
- What is made inside an operation and never read outside lives while it runs.
- A call that writes in place right behind the maker is part of the maker. Else what has
  made the storage is not repeated. Counters and statistics that an operation changes,
  and that nothing in the iteration makes, do not keep it from being repeated.

A trace has no times. With a Kineto trace of the same program, those of the kernels
count: calls are found by their ``Record function id``, or in older traces by their
order, in the last iteration that has the same ones. Else every operation takes its
bytes over 1 TB/s, which says something about memory only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from chainer_hybridmem import files
from chainer_hybridmem.errors import FormatError
from chainer_hybridmem.lab.importing.graphs import (
    BYTES_PER_SECOND,
    MOST_NODES,
    Buffer,
    GraphNode,
    build_profile,
)
from chainer_hybridmem.lab.importing.reading import parse_json
from chainer_hybridmem.planning.records.profile import Link, Profile

_ENGINE = 'autograd::engine::evaluate_function'
_OPTIMIZER = 'Optimizer.'
_DEVICES = ('cuda', 'hip', 'xpu')
_DEEPEST = 1000
_MICROSECOND = 1e-6
_OPERATION, _LAUNCH = 'cpu_op', 'cuda_runtime'  # kinds of Kineto's events
_LAST = 1 << 60

Tensor = tuple[int, int, bool]
"""Number of the storage, its last byte as this tensor has it, whether on a GPU."""


@dataclasses.dataclass(slots=True)
class _Call:
    """One node of a trace.

    Attributes:
        started (int): Its place in the order in which calls began.
        thread (int): The thread it ran on.
    """

    number: int
    started: int
    name: str
    schema: str
    parent: int
    thread: int
    reads: list[Tensor]
    gives: list[Tensor]
    inner: list[_Call] = dataclasses.field(default_factory=list)


def read_trace(data: bytes, times: bytes | None, link: Link) -> Profile:
    """The last whole iteration of a trace.

    Args:
        data: The execution trace.
        times: A Kineto trace of the same run; None for none.
        link: The path to host memory, of which traces say nothing.

    Raises:
        FormatError: If it is no such trace, or has no forward and backward pass.
    """
    body = parse_json(data)
    if not isinstance(body, dict) or not isinstance(body.get('nodes'), list):
        raise FormatError('The file is no execution trace: it has no nodes.')
    if len(body['nodes']) > MOST_NODES:
        raise FormatError(f'The trace has more than {MOST_NODES} nodes.')
    with files.reading('trace'):
        calls = [_call(node) for node in body['nodes']]
        if times is not None:
            seconds = _kernel_seconds(parse_json(times), calls)
        else:
            seconds = None
        maker = _Maker(seconds, any(t[2] for c in calls for t in c.gives))
        forward, backward, update = _last_iteration(_outermost(calls))
        for call in forward:
            maker.add(call, backward=False)
        for call in backward:
            maker.add(call, backward=True)
        maker.see_update(update)
        return maker.profile(link)


# -- nodes --------------------------------------------------------------------
def _call(node: dict[str, Any]) -> _Call:
    """A node of either version of the format."""
    more = {a['name']: a.get('value') for a in node.get('attrs', ())}
    reads, gives = node.get('inputs', []), node.get('outputs', [])
    kinds = node.get('input_types', ()), node.get('output_types', ())
    if isinstance(reads, dict):
        kinds = reads['types'], gives['types']
        reads, gives = reads['values'], gives['values']
    return _Call(
        number=int(node['id']),
        started=int(more.get('rf_id', node.get('rf_id', node['id']))),
        name=str(node['name']),
        schema=str(more.get('op_schema', node.get('op_schema', ''))),
        parent=int(node.get('ctrl_deps', node.get('parent', 0))),
        thread=int(more.get('tid', node.get('tid', 0))),
        reads=list(_tensors(reads, kinds[0])),
        gives=list(_tensors(gives, kinds[1])),
    )


def _tensors(values: Iterable[Any], kinds: Iterable[str]) -> Iterator[Tensor]:
    for value, kind in zip(values, kinds, strict=False):
        if kind.startswith('Tensor'):
            _, storage, offset, count, width, device = value
            end = (int(offset) + int(count)) * int(width)
            if storage and end > 0:
                yield int(storage), end, str(device).startswith(_DEVICES)
        elif kind.startswith('GenericList[Tensor'):
            yield from _tensors(value, kind[len('GenericList[') : -1].split(','))


_FORWARD, _BACKWARD, _UPDATE = range(3)


def _outermost(calls: list[_Call]) -> list[tuple[int, _Call]]:
    """Outermost calls with a schema, as they began, each with its part."""
    calls = sorted(calls, key=lambda call: call.started)
    by_number = {call.number: call for call in calls}
    part: dict[int, int] = {}
    inside: set[int] = set()
    found = []
    for call in calls:
        parent = by_number.get(call.parent)
        known = call.parent in part and parent is not call
        part[call.number] = _part(call, part[call.parent] if known else _FORWARD)
        if known and call.parent in inside and parent is not None:
            parent.inner.append(call)
            inside.add(call.number)
        elif call.schema:
            inside.add(call.number)
            found.append((part[call.number], call))
    return found


def _part(call: _Call, around: int) -> int:
    if call.name.startswith(_ENGINE):
        return _BACKWARD
    return _UPDATE if call.name.startswith(_OPTIMIZER) else around


def _last_iteration(
    calls: list[tuple[int, _Call]],
) -> tuple[list[_Call], list[_Call], list[_Call]]:
    """Forward, backward and update of the last whole iteration.

    Raises:
        FormatError: If there is none.
    """
    parts: list[list[_Call]] = [[], [], []]
    whole = None
    for part, call in calls:
        if part == _FORWARD and parts[_BACKWARD]:
            parts = [[], [], []]
        if part != _UPDATE or parts[_BACKWARD]:  # gradients are cleared before forward
            parts[part].append(call)
        if parts[_FORWARD] and parts[_BACKWARD]:
            whole = parts
    if whole is None:
        raise FormatError('The trace has no forward pass with a backward pass.')
    return whole[_FORWARD], whole[_BACKWARD], whole[_UPDATE]


def _kernel_seconds(body: Any, calls: list[_Call]) -> dict[int, float]:
    """Seconds of the kernels that each call starts, by its place in the order.

    Raises:
        FormatError: If it cannot be said which call is which.
    """
    with files.reading('Kineto trace'):
        events = [e for e in body['traceEvents'] if isinstance(e.get('args'), dict)]
        recorded = {
            e['args']['External id']: int(e['args']['Record function id'])
            for e in events
            if 'Record function id' in e['args'] and 'External id' in e['args']
        }
        found, key = recorded, 'External id'
        if not recorded:
            found, key = _launches(events, calls), 'correlation'
        seconds: dict[int, float] = {}
        for event in events:
            call = found.get(event['args'].get(key))
            if event.get('cat') == 'kernel' and call is not None:
                spent = float(event['dur']) * _MICROSECOND
                seconds[call] = seconds.get(call, 0.0) + spent
        return seconds


def _launches(events: list[dict[str, Any]], calls: list[_Call]) -> dict[Any, int]:
    """By the correlation of a kernel, the call that has launched it."""
    threads: dict[Any, list[dict[str, Any]]] = {}
    for event in events:
        if event.get('cat') in (_OPERATION, _LAUNCH):
            threads.setdefault(event['tid'], []).append(event)
    lanes = []
    for lane in threads.values():
        lane.sort(key=lambda e: (e['ts'], -e['dur'], e['args'].get('Ev Idx', _LAST)))
        lanes.append([e for e in lane if e['cat'] == _OPERATION])
    known = {event['name'] for lane in lanes for event in lane}
    places: dict[int, int] = {}  # of a call, by its event
    for thread in {call.thread for call in calls}:
        own = [c for c in calls if c.thread == thread and c.name in known]
        own.sort(key=lambda call: call.started)
        places.update(_same_calls(own, lanes))
    found = {}
    for lane in threads.values():
        around: list[dict[str, Any]] = []
        for event in lane:
            while around and around[-1]['ts'] + around[-1]['dur'] < event['ts']:
                around.pop()
            if event['cat'] == _OPERATION:
                around.append(event)
            elif around and id(around[-1]) in places:
                found[event['args'].get('correlation')] = places[id(around[-1])]
    return found


def _same_calls(
    calls: list[_Call], lanes: list[list[dict[str, Any]]]
) -> Iterator[tuple[int, int]]:
    """Events, and places, of the last calls of one thread that are just these.

    Raises:
        FormatError: If no thread has made them, one right after the other.
    """
    wanted = ''.join(f'\n{call.name}' for call in calls) + '\n'
    for lane in lanes if calls else ():
        names = ''.join(f'\n{event["name"]}' for event in lane) + '\n'
        at = names.rfind(wanted)
        if at >= 0:
            first = names.count('\n', 0, at)
            for call, event in zip(calls, lane[first:], strict=False):
                yield id(event), call.started
            return
    if calls:
        raise FormatError(
            'The Kineto trace is of another program: it has no "Record function id", '
            f'and nowhere the {len(calls)} calls of thread {calls[0].thread} in this '
            'order. Leave it out.'
        )


# -- buffers ------------------------------------------------------------------
class _Maker:
    """Nodes and buffers so far; which buffer each storage is at the moment."""

    def __init__(self, seconds: dict[int, float] | None, gpu: bool) -> None:
        self._seconds, self._gpu = seconds, gpu
        self._now: dict[int, int] = {}
        self._sizes: list[int] = []
        self._made_by: dict[int, int] = {}  # node by buffer
        self._spoilt: set[int] = set()  # nodes whose products others write over
        self._nodes: list[GraphNode] = []

    def add(self, call: _Call, backward: bool) -> None:
        """One operation, with everything inside it."""
        reads: dict[int, None] = {}
        makes: dict[int, None] = {}
        writes: dict[int, None] = {}
        spent = self._visit(call, reads, makes, writes, 0)
        touched = sum(self._sizes[b] for b in (*reads, *makes))
        if self._seconds is None:
            spent = touched / BYTES_PER_SECOND if makes or writes else 0.0  # a view
        changed = [b for b in writes if b in self._made_by]
        before = self._nodes[-1] if self._nodes else None
        number = len(self._nodes)
        joined = (
            before is not None
            and bool(changed)
            and before.backward == backward
            and all(b in before.makes for b in changed)
        )
        if joined and before is not None:
            number -= 1
            others = [b for b in reads if b not in before.makes]
            self._nodes[-1] = dataclasses.replace(
                before,
                label=f'{before.label}+{_short(call.name)}',
                seconds=before.seconds + spent,
                reads=tuple(dict.fromkeys((*before.reads, *others))),
                makes=(*before.makes, *makes),
            )
        else:
            self._spoilt.update(self._made_by[b] for b in changed)
            if changed:
                self._spoilt.add(number)
            node = GraphNode(
                label=f'/{number}/{_short(call.name)}',
                backward=backward,
                seconds=spent,
                reads=tuple(reads),
                makes=tuple(makes),
            )
            self._nodes.append(node)
        self._made_by.update(dict.fromkeys(makes, number))

    def see_update(self, calls: list[_Call]) -> None:
        """What an optimizer reads is there all the time, unless backward makes it."""
        for call in calls:
            self._visit(call, {}, {}, {}, 0)

    def _visit(
        self,
        call: _Call,
        reads: dict[int, None],
        makes: dict[int, None],
        writes: dict[int, None],
        depth: int,
    ) -> float:
        if depth > _DEEPEST:
            raise FormatError(f'Calls are more than {_DEEPEST} levels deep.')
        given = set()
        for storage, end, gpu in call.reads:
            if gpu is self._gpu:
                given.add(storage)
                b = self._buffer(storage, end)
                if b not in makes:
                    reads[b] = None
        spent = (self._seconds or {}).get(call.started, 0.0)
        made_before = set(makes)
        for inner in call.inner:
            spent += self._visit(inner, reads, makes, writes, depth + 1)
        mutates = '!)' in call.schema
        for storage, end, gpu in call.gives:
            if gpu is not self._gpu:
                continue
            now = self._now.get(storage, -1)
            inside = now in makes and now not in made_before
            if storage in given or inside:
                b = self._buffer(storage, end)
                if mutates and b not in makes:
                    writes[b] = None
            else:
                b = self._new(storage, end)
                makes[b] = None
        return spent

    def _buffer(self, storage: int, end: int) -> int:
        """The buffer that a storage is now; one that is there before, if it is new."""
        b = self._now.get(storage, -1)
        if b < 0:
            return self._new(storage, end)
        self._sizes[b] = max(self._sizes[b], end)
        return b

    def _new(self, storage: int, end: int) -> int:
        self._sizes.append(end)
        self._now[storage] = len(self._sizes) - 1
        return len(self._sizes) - 1

    def profile(self, link: Link) -> Profile:
        """The iteration; buffers of the optimizer that nothing makes are there."""
        nodes = [
            dataclasses.replace(node, repeatable=number not in self._spoilt)
            for number, node in enumerate(self._nodes)
        ]
        device = {
            'kind': 'import',
            'name': 'as traced by PyTorch',
            'times': 'Kineto' if self._seconds is not None else 'bytes touched',
        }
        return build_profile(nodes, [Buffer(n) for n in self._sizes], link, device)


def _short(name: str) -> str:
    return name.rpartition('::')[2].replace('/', '.')
