"""Reading and writing Chainer's graph.

============== ====================================================================
file           about
============== ====================================================================
slots          references of the graph to arrays, which may be cleared and filled
places         where a function keeps arrays as attributes, present or away
nodes          where a variable node keeps what it retains, present or away
function_nodes function nodes: names, kinds, hooks, the nodes around them
doors          what restores an array that is away when the program reads it; the
               loops of backward, which read before any hook runs
replaying      running a forward again
by_owner       a table of what is known about objects that may die
============== ====================================================================
"""

from chainer_hybridmem.training.chainer_access.graph.by_owner import (
    ByOwner,
    Entries,
    Entry,
)
from chainer_hybridmem.training.chainer_access.graph.doors import (
    BACKWARD_LOOP,
    backward_runs,
    class_values,
    find_running_link,
    frame_of,
    kind_of,
)
from chainer_hybridmem.training.chainer_access.graph.function_nodes import (
    FRAMEWORK,
    StaticScheduleFunction,
    add_local_hook,
    communicates,
    function_name,
    function_of,
    is_unfinished,
    may_go_back,
    name_and_arrays,
    node_array,
    output_arrays,
    refuse_static,
    replace_forward,
    restore_forward,
    retained_array,
    retained_inputs,
    target,
)
from chainer_hybridmem.training.chainer_access.graph.nodes import find_known_content
from chainer_hybridmem.training.chainer_access.graph.places import (
    BringBack,
    attribute_arrays,
    away_values,
    read_attribute,
)
from chainer_hybridmem.training.chainer_access.graph.replaying import (
    Pristine,
    pristine,
    pristine_again,
    product,
    replay,
    set_forward,
    settings,
)
from chainer_hybridmem.training.chainer_access.graph.slots import (
    NodeRef,
    SlotRef,
    find_slots,
    refer,
)

__all__ = [
    'BACKWARD_LOOP',
    'FRAMEWORK',
    'BringBack',
    'ByOwner',
    'Entries',
    'Entry',
    'NodeRef',
    'Pristine',
    'SlotRef',
    'StaticScheduleFunction',
    'add_local_hook',
    'attribute_arrays',
    'backward_runs',
    'class_values',
    'communicates',
    'find_known_content',
    'find_running_link',
    'find_slots',
    'frame_of',
    'function_name',
    'function_of',
    'is_unfinished',
    'kind_of',
    'away_values',
    'may_go_back',
    'name_and_arrays',
    'node_array',
    'output_arrays',
    'pristine',
    'pristine_again',
    'product',
    'read_attribute',
    'refer',
    'refuse_static',
    'replace_forward',
    'replay',
    'restore_forward',
    'retained_array',
    'retained_inputs',
    'set_forward',
    'settings',
    'target',
]
