"""Parameters and optimizer states: who holds them, and what stands in for them.

Note: [lazy owners]
    A parameter or update rule whose array is leaving or away gets a class made of the
    one it had. Reading the array restores it first, be it in an update, a snapshot, an
    evaluation or a hook. So a plan that the iteration has left, or that is wrong, costs
    time and never contents. ``cleargrads`` asks between forward and backward whether
    there is an array; this question is answered without it. Every backward function
    reads the node of a parameter before the hooks run: it says None, and the hook
    restores what the function reads. The package itself looks at what is there and
    brings nothing back: it may look while memory is short, because one is on its way.

Note: [shared placeholders]
    ``Link.copy`` makes parameters that share the list with the array, and one of them
    cannot know that another one has emptied it. Such an array stays where it is.

Note: [replaced parameters]
    A link hook may put a variable of the graph in the place of a parameter while its
    link runs (spectral normalization, weight standardization), and memory may be short
    just then. So what a model has at a path is what was last seen there as a parameter,
    as long as that lives.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import chainer

from chainer_hybridmem.planning.records.profile import Category
from chainer_hybridmem.training.chainer_access.graph import ByOwner
from chainer_hybridmem.training.devices.protocol import Array, Device

CHILDREN = '_children'  # attribute in which a chain holds its links
_AWAY = '_hybridmem_away'


class Owner:
    """One array that a parameter or an update rule holds.

    Attributes:
        label (str): Path of the parameter; for a state its name behind a colon.
        category (Category): What the array holds.
    """

    category: Category
    _field: str  # attribute with the array's container

    def __init__(self, label: str, holder: Any) -> None:
        self.label = label
        self._holder = holder

    @property
    def node(self) -> Any:
        """The node of the graph that refers to the array; None for a state."""
        return None

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        array = self.get()
        return 0 if array is None else int(array.nbytes)

    def get(self) -> Array | None:
        """The array; None if there is none or it is away."""
        raise NotImplementedError

    def alone(self) -> bool:
        """Whether only the holder refers to the container of the array."""
        return True

    def count_places(self) -> int:
        """In how many places the owner refers to the array."""
        return 1

    def put(self, array: Array | None) -> None:
        """Fills or empties the container."""
        raise NotImplementedError

    def watch(self, bring_back: Callable[[], None], nbytes: int) -> None:
        """Calls ``bring_back`` before the array, of so many bytes, is read."""
        away = self._holder.__dict__.setdefault(_AWAY, {})
        away[self.label] = _Away(self, bring_back, nbytes)
        if len(away) == 1:
            self._holder.__class__ = _away_class(self._holder.__class__, self._field)

    def unwatch(self) -> None:
        """The array is there to stay."""
        away = self._holder.__dict__.get(_AWAY)
        if away is None:
            return
        away.pop(self.label, None)
        if away:
            return
        # An interrupt may have come between any two of these lines.
        kind = type(self._holder)
        if _AWAY in vars(kind):
            self._holder.__class__ = kind.__bases__[0]
        self._holder.__dict__.pop(_AWAY, None)


class _Away(NamedTuple):
    """An array that is leaving or away."""

    owner: Owner
    bring_back: Callable[[], None]
    nbytes: int


class ParameterOwner(Owner):
    """A parameter: its variable and the variable's node."""

    category = Category.PARAMETER
    _field = '_data'

    def __init__(self, label: str, holder: Any) -> None:
        super().__init__(label, holder)
        self._retained = False  # whether the node had it, too

    @property
    def node(self) -> Any:
        return self._holder._node

    def get(self) -> Array | None:
        return self._holder.__dict__['_data'][0]

    def alone(self) -> bool:
        """See [shared placeholders]."""
        return sys.getrefcount(self._holder.__dict__['_data']) <= 2

    def count_places(self) -> int:
        return 1 + (self._holder._node._data is not None)

    def put(self, array: Array | None) -> None:
        """See :class:`Owner`; the node has the array if it had it before."""
        node, container = self._holder._node, self._holder.__dict__['_data']
        if array is None:
            self._retained = node._data is not None
        container[0] = array
        if self._retained:
            node._data = array


class EntryOwner(Owner):
    """An entry of a dictionary that its holder has."""

    def __init__(self, label: str, holder: Any, name: str) -> None:
        super().__init__(label, holder)
        self._name = name

    @property
    def _entries(self) -> Any:
        raise NotImplementedError

    def get(self) -> Array | None:
        return (self._entries or {}).get(self._name)

    def put(self, array: Array | None) -> None:
        self._entries[self._name] = array


class StateOwner(EntryOwner):
    """One entry of an update rule's state."""

    category = Category.OPTIMIZER_STATE
    _field = '_state'

    @property
    def _entries(self) -> Any:
        return self._holder.__dict__['_state']


class PersistentOwner(EntryOwner):
    """A persistent array of a link, such as a running mean; it is never away."""

    category = Category.PARAMETER

    @property
    def _entries(self) -> Any:
        return self._holder.__dict__


_seen: ByOwner[dict[str, weakref.ref[chainer.Parameter]]] = ByOwner()  # by model


def parameters_of(model: chainer.Link) -> list[tuple[str, chainer.Parameter]]:
    """Every parameter by path, also where another variable stands in for it now.

    See [replaced parameters]; those that are not initialized are among them.
    """
    seen = _seen.get(model)
    if seen is None:
        seen = _seen[model] = {}
    named = list(model.namedparams())
    kinds = {type(variable) for _, variable in named}
    if not all(issubclass(kind, chainer.Parameter) for kind in kinds):
        last = {path: reference() for path, reference in seen.items()}
        last.update((path, v) for path, v in named if isinstance(v, chainer.Parameter))
        found = [(path, last.get(path)) for path, _ in named]
        named = [(path, p) for path, p in found if p is not None]
    seen.update({path: weakref.ref(parameter) for path, parameter in named})
    return named


def owners_of(model: chainer.Link) -> Iterator[Owner]:
    """Every array of the model's parameters and of their update rules, by path."""
    kinds = chainer.get_array_types()
    seen: set[int] = set()
    for path, parameter in parameters_of(model):
        if id(parameter) in seen or not parameter.is_initialized:
            continue
        seen.add(id(parameter))
        yield ParameterOwner(path, parameter)
        rule = parameter.update_rule
        for name, value in _states_of(rule).items():
            if isinstance(value, kinds):
                yield StateOwner(f'{path}:{name}', rule, name)


def persistents_of(model: chainer.Link) -> Iterator[Owner]:
    """Every persistent array of the model's links, by path."""
    kinds = chainer.get_array_types()
    for path, link in model.namedlinks():
        for name in link._persistent:
            if isinstance(link.__dict__.get(name), kinds):
                yield PersistentOwner(f'{path}/{name}', link, name)


def move_in(model: chainer.Link, device: Device) -> None:
    """Moves arrays that only the model has into memory of the device, if they fit.

    In another pool each of them would keep the large block that it was cut from.
    """
    for owner in (*owners_of(model), *persistents_of(model)):
        array = owner.get()
        if array is None or not device.arrays.owns(array) or not owner.alone():
            continue
        node = owner.node
        holders = 1 + (node is not None and node._data is array)
        # Also counted here: the name, and the argument.
        if array.base is not None or sys.getrefcount(array) > holders + 2:
            continue
        try:
            copied = array.copy(order='K')
        except MemoryError:
            return
        if copied.strides == array.strides:
            owner.put(None)
            owner.put(copied)


def bring_home(model: chainer.Link) -> None:
    """Everything of a model that is leaving or away comes back.

    Raises:
        SwapStoreError: If values are lost.
    """
    for holder in _holders_of(model):
        _come_home(holder)


def model_arrays(model: chainer.Link, device: Device | None = None) -> list[Any]:
    """What stays from iteration to iteration and is there, as arrays.

    Args:
        model: Has them.
        device: Only its arrays are meant: some layers may be elsewhere.
    """
    arrays = [array for _, array in permanent_arrays(model)]
    if device is None:
        return arrays
    return [array for array in arrays if device.arrays.owns(array)]


def permanent_arrays(
    model: chainer.Link, rules: list[Any] | None = None
) -> list[tuple[Category, Any]]:
    """Parameters, gradients, optimizer states and persistent arrays that are there.

    Args:
        model: Has them.
        rules: Gets the update rule of each parameter that has one.
    """
    kinds = chainer.get_array_types()
    parameters = [parameter for _, parameter in parameters_of(model)]
    found = [rule for p in parameters if (rule := p.update_rule) is not None]
    if rules is not None:
        rules += found
    arrays = [p.__dict__['_data'][0] for p in parameters]  # what is away stays so
    for link in model.links():
        if link._persistent:
            own = link.__dict__
            values = [own.get(name) for name in link._persistent]
            arrays += [value for value in values if isinstance(value, kinds)]
    # The public property raises where there is none.
    gradients = [parameter._grad for parameter in parameters]
    states = [state for rule in found for state in _states_of(rule).values()]
    return [
        *((Category.PARAMETER, array) for array in arrays if array is not None),
        *((Category.GRADIENT, array) for array in gradients if array is not None),
        *((Category.OPTIMIZER_STATE, s) for s in states if isinstance(s, kinds)),
    ]


def named_arrays(model: chainer.Link) -> Iterator[tuple[str, Array]]:
    """Gradients and persistent arrays by path; a gradient's name ends in ``:grad``."""
    kinds = chainer.get_array_types()
    for path, parameter in parameters_of(model):
        if isinstance(parameter._grad, kinds):
            yield f'{path}:grad', parameter._grad
    for owner in persistents_of(model):
        array = owner.get()
        if array is not None:
            yield owner.label, array


def arrays_by_link(model: chainer.Link) -> Iterator[tuple[str, Category, Any]]:
    """Path of the link, kind and array of all that a model keeps.

    Parameters, gradients, optimizer states and persistent arrays that are there.
    """
    for path, parameter in parameters_of(model):
        if not parameter.is_initialized:
            continue
        link = path.rpartition('/')[0]
        yield link, Category.PARAMETER, held_array(parameter)
        yield link, Category.GRADIENT, parameter._grad
        for value in _states_of(parameter.update_rule).values():
            yield link, Category.OPTIMIZER_STATE, value
    for owner in persistents_of(model):
        yield owner.label.rpartition('/')[0], Category.PARAMETER, owner.get()


def held_array(variable: chainer.Variable) -> Array | None:
    """The array of a variable; None if it is away, which it stays."""
    array: Array | None = (vars(variable).get('_data') or [None])[0]
    return array


def away_bytes(model: chainer.Link) -> int:
    """Bytes of parameters and optimizer states that are away."""
    return sum(
        away.nbytes
        for holder in _holders_of(model)
        for away in vars(holder).get(_AWAY, {}).values()
        if away.owner.get() is None
    )


def _holders_of(model: chainer.Link) -> list[Any]:
    """Each parameter and update rule once, also of shared parameters."""
    found: dict[int, Any] = {}
    for _, parameter in parameters_of(model):
        for holder in (parameter, parameter.update_rule):
            if holder is not None:
                found[id(holder)] = holder
    return list(found.values())


def _states_of(rule: Any) -> dict[str, Any]:
    """The states of an update rule by name; None for those that are away."""
    return {} if rule is None else vars(rule)['_state'] or {}


def updates(nodes: Iterable[Any]) -> tuple[int, ...]:
    """How often each parameter among variable nodes has been updated."""
    counts = []
    for node in nodes:
        if node.creator_node is None:
            variable = node.get_variable_or_none()
            rule = getattr(variable, 'update_rule', None)
            if rule is not None:
                counts.append(rule.t)
    return tuple(counts)


def is_parameter(node: Any) -> bool:
    """Whether a reference of the graph is that of a parameter's own node."""
    if not isinstance(node, chainer.variable.VariableNode):
        return False
    return isinstance(node.get_variable_or_none(), chainer.Parameter)


def _come_home(holder: Any) -> None:
    for away in list(holder.__dict__.get(_AWAY, {}).values()):
        away.bring_back()


@functools.cache
def _away_class(kind: type, field: str) -> type:
    """A class like ``kind`` that brings the field back; see [lazy owners]."""

    def fetch(self: Any) -> Any:
        _come_home(self)
        return self.__dict__[field]

    def store(self: Any, value: Any) -> None:
        _come_home(self)
        self.__dict__[field] = value

    def copied(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any) -> Any:
            _come_home(self)
            return getattr(self, name)(*args)

        return method

    names: dict[str, Any] = {field: property(fetch, store), _AWAY: None}
    for name in ('__copy__', '__deepcopy__', '__reduce_ex__'):
        if hasattr(kind, name):
            names[name] = copied(name)
    if issubclass(kind, chainer.Parameter):
        names['is_initialized'] = property(lambda self: True)
    return type(kind.__name__, (kind,), names)
