"""Function nodes: their names and kinds, their hooks, the nodes around them."""

from __future__ import annotations

import collections
import functools
import gc
import itertools
from collections.abc import Callable
from typing import Any, NoReturn

import chainer
from chainer.function import FunctionAdapter
from chainer.graph_optimizations.static_graph import (
    StaticScheduleFunction as StaticScheduleFunction,
)
from chainer.variable import VariableNode

from chainer_hybridmem.errors import SessionError
from chainer_hybridmem.training.devices.protocol import Array

# Attributes of function nodes that belong to Chainer, not to the function.
FRAMEWORK = frozenset(
    {'inputs', 'outputs', '_retained_output_data', '_function', '_weak_function'}
    | {'_chainerx_retained_inputs', '_chainerx_retained_outputs'}
    | {'_local_function_hooks'}
)


def target(function: Any) -> Any:
    """The object that has the attributes: function nodes wrap old-style functions."""
    if isinstance(function, FunctionAdapter):
        return function._function or function
    return function


_BACKWARDS = {
    chainer.FunctionNode: ('backward', 'backward_accumulate'),
    chainer.Function: ('backward', 'backward_cpu', 'backward_gpu'),
}


def may_go_back(function: Any) -> bool:
    """Whether a backward pass can run a function that is in the graph.

    One of its inputs asks for a gradient, and its class has a backward.
    """
    own = target(function)
    base = next(base for base in _BACKWARDS if isinstance(own, base))
    kind = type(own)
    has_one = any(
        getattr(kind, name) is not getattr(base, name) for name in _BACKWARDS[base]
    )
    return has_one and any(node.requires_grad for node in function.inputs or ())


def function_of(owner: Any) -> Any:
    """The function node that has an attribute or has made what a node retains.

    None if there is none any more.
    """
    if isinstance(owner, VariableNode):
        return owner.creator_node
    return owner if isinstance(owner, chainer.FunctionNode) else owner.node


def function_name(function: Any) -> str:
    """Name of the function's class, also for old-style functions."""
    if isinstance(function, FunctionAdapter):  # as target(), in one call
        function = function._function or function
    return type(function).__name__


def known_functions() -> set[str]:
    """Names of all kinds of functions that have been imported, as function_name has."""
    found: set[type] = set()
    left: list[type] = [chainer.FunctionNode, chainer.Function]
    while left:
        new: set[type] = set(left.pop().__subclasses__()) - found
        left += new
        found |= new
    return {kind.__name__ for kind in found}


def may_have_arrays(own: Any) -> bool:
    """Whether a :func:`target` may have arrays as attributes, or lists of them.

    An object whose ``__dict__`` nobody has asked for does without one, and reads its
    attributes faster. So only functions that seem to have arrays are asked.
    """
    values = gc.get_referents(own)
    kinds = set(map(type, values))
    found = set(map(role_of, kinds))
    if dict in kinds or ARRAY in found:  # a dictionary may be its own
        return True
    return SEQUENCE in found and any(
        ARRAY in map(role_of, map(type, value))
        for value in values
        if roles[type(value)] == SEQUENCE
    )


def name_and_arrays(own: Any) -> tuple[str, ...]:
    """Name of a :func:`target`'s class, and of arrays it has before its forward."""
    if not may_have_arrays(own):
        return (type(own).__name__,)
    values = vars(own)  # the dictionary may be its own
    are_arrays = map(ARRAY.__eq__, map(role_of, map(type, values.values())))
    return type(own).__name__, *itertools.compress(values, are_arrays)


OTHER, ARRAY, SEQUENCE = range(3)
MOST_ROLES = 1024  # a program may make classes without end


class _Roles(dict[type, int]):
    """Whether values of a type are arrays, or may have some in them.

    A look-up runs no code of Python's: each attribute of each function is looked at.
    """

    def __missing__(self, kind: type) -> int:
        if len(self) >= MOST_ROLES:
            self.clear()
        role = SEQUENCE if kind in (list, tuple) else OTHER
        self[kind] = role = ARRAY if issubclass(kind, array_types()) else role
        return role


roles = _Roles()
role_of = roles.__getitem__


@functools.cache
def array_types() -> tuple[type, ...]:
    """The kinds of arrays that Chainer knows."""
    return tuple(chainer.get_array_types())


def retained_inputs(function: Any) -> list[Any]:
    """Variable nodes of the inputs that backward reads."""
    inputs = function.inputs or ()
    kept = function._input_indexes_to_retain or ()
    return [inputs[index] for index in kept if index < len(inputs)]


def output_arrays(function: Any) -> list[Array | None]:
    """Output arrays that are still reachable through the graph or the user."""
    result = []
    for reference in function.outputs or ():
        node = reference()
        result.append(None if node is None else node_array(node))
    return result


# -- kinds --------------------------------------------------------------------
def is_unfinished(function: Any) -> bool:
    """Whether a called function is in no graph because it has failed."""
    return function is None or function.inputs is None


def refuse_static() -> NoReturn:
    """Refuses a :class:`StaticScheduleFunction`: it runs a schedule, not a graph.

    Raises:
        SessionError: Always.
    """
    raise SessionError(
        'The model uses @static_graph: its schedule keeps every array to itself, '
        'and none can leave. Set chainer.config.use_static_graph = False, which '
        'runs the same network define-by-run.'
    )


def communicates(function: Any) -> bool:
    """Whether forward talks to other processes.

    They would have to answer at the same moment: each of them has a plan of its own.
    """
    own = target(function)
    return any(
        type(part).__module__.partition('.')[0] == 'chainermn'
        for part in (own, *vars(own).values())
    )


# -- what is put in place of Chainer's own ------------------------------------
def add_local_hook(function: Any, hook: chainer.FunctionHook) -> None:
    """Calls a hook in the backward of a function, in whatever thread that is."""
    hooks = function._local_function_hooks
    if hooks is None:
        hooks = function._local_function_hooks = collections.OrderedDict()
    hooks[hook.name] = hook


def replace_forward(function: Any, forward: Callable[..., Any]) -> None:
    """Lets one function object run another forward than its class's."""
    vars(function)['forward'] = forward


def restore_forward(function: Any) -> None:
    """Ends :func:`replace_forward`: the function runs its class's forward again."""
    del vars(function)['forward']


def retained_array(node: Any) -> Array | None:
    """The array that a variable node itself holds now; restores nothing."""
    array: Array | None = node._data
    return array


def node_array(node: Any) -> Array | None:
    """The array of a variable node, from the node or its live Variable."""
    if node is None:
        return None
    if node._data is not None:
        return node._data
    variable = node.get_variable_or_none()
    return None if variable is None else variable.array
