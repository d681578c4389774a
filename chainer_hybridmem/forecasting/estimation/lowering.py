"""What a recording without cuDNN would look like with cuDNN.

NumPy, and CuPy without cuDNN, convolve through a matrix of all patches (im2col)
and pool with an index array. With cuDNN Chainer 7.8.1 (``forward_gpu`` of each
function) does without:

- Functions that cuDNN serves allocate nothing while they run but a convolution's
  workspace, and the gradient that is about to be added to that of another branch.
- Gradients of convolution and pooling have the size of their input, padding
  excluded.
- Pooling keeps its input and its output for backward, and no index array.
- A pass of a recipe is one kernel and needs nothing but its products.
- Local response normalisation, kernels of CuPy, keeps one array besides input and
  output; in backward it needs one temporary of the input's size.

Everything else stays as recorded, which is on the safe side: temporaries of
elementwise functions that CuPy would fuse, and dropout masks of full size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from chainer_hybridmem.forecasting.estimation import costs
from chainer_hybridmem.forecasting.estimation.structure import (
    assemble,
    events_by_operation,
    passing,
)
from chainer_hybridmem.planning.records.profile import (
    Category,
    Operation,
    Phase,
    Profile,
    Recipe,
    Slot,
    SlotKind,
    Storage,
)
from chainer_hybridmem.planning.records.specs import spec_bytes

WORKSPACE_BYTES = 8 * 2**20
"""Most that Chainer lets a cuDNN convolution use (``get_max_workspace_size``)."""

CONVOLUTIONS = costs.CONVOLUTIONS | costs.DECONVOLUTIONS
POOLINGS, LRN = costs.POOLINGS, costs.LRN
ACTIVATIONS = frozenset({'ReLU', 'ClippedReLU', 'Sigmoid', 'Tanh'})
SOFTMAXES = frozenset({'Softmax', 'LogSoftmax'})
SERVED = (
    CONVOLUTIONS | POOLINGS | costs.NORMALIZATIONS | ACTIVATIONS | SOFTMAXES | {LRN}
)

# Attributes that only the implementation for the CPU keeps.
_CPU_ATTRIBUTES = {
    **dict.fromkeys(POOLINGS, 'indexes'),
    LRN: 'unit_scale',
}


def lower_to_cudnn(profile: Profile, workspace_bytes: int = WORKSPACE_BYTES) -> Profile:
    """Replaces the memory behaviour of functions that cuDNN serves.

    Args:
        profile: As recorded.
        workspace_bytes: What each convolution may use while it runs.

    Returns:
        Profile: With the same operations and times. Lowering it again changes
        nothing but workspaces.
    """
    return _Lowering(profile, workspace_bytes).run()


class _Lowering:
    def __init__(self, profile: Profile, workspace_bytes: int) -> None:
        self.profile = profile
        self.workspace_bytes = workspace_bytes
        self.storages: list[Storage | None] = list(profile.storages)
        self.groups = events_by_operation(profile)
        self.backward_of = {
            op.forward: op.index
            for op in profile.operations
            if op.phase is Phase.BACKWARD and op.forward >= 0
        }
        self.gradients = costs.gradients_by_storage(profile)
        self.held: dict[int, list[int]] = {}  # with slots, by producer
        for storage in profile.storages:
            if storage.slots:
                self.held.setdefault(storage.producer, []).append(storage.id)

    def run(self) -> Profile:
        for op in self.profile.operations:
            if op.function not in SERVED or op.phase is Phase.UPDATE:
                continue
            if op.phase is Phase.FORWARD:
                self._drop_attribute(op)
                if op.function in POOLINGS:
                    self._keep_for_backward(op)
            else:
                self._fit_gradients(op)
            self._replace_temporaries(op)
        return assemble(
            self.profile,
            self.groups,
            self.storages,
            [self._recipe(recipe) for recipe in self.profile.recipes],
            self.profile.initial_bytes,
        )

    def _forward(self, op: Operation) -> Operation:
        return self.profile.operations[op.forward] if op.forward >= 0 else op

    def _input_bytes(self, op: Operation) -> int:
        specs = self._forward(op).specs
        return spec_bytes(specs[0]) if specs else 0

    def _drop_attribute(self, op: Operation) -> None:
        name = _CPU_ATTRIBUTES.get(op.function)
        for index in self.held.get(op.index, ()):
            slots = self.profile.storages[index].slots
            if all(_is_attribute(slot, op.index, name) for slot in slots):
                self._remove(index)

    def _remove(self, storage: int) -> None:
        self.storages[storage] = None
        for k, events in enumerate(self.groups):
            if storage + 1 in events or -storage - 1 in events:
                self.groups[k] = [e for e in events if abs(e) != storage + 1]

    def _keep_for_backward(self, op: Operation) -> None:
        """Pooling retains its input and its output."""
        backward = self.backward_of.get(op.index)
        if backward is None or not op.reads:
            return
        self._retain(op.reads[0], backward, [Slot(op.index, SlotKind.INPUT, 0)])
        output = _output(self.profile, op)
        if output is not None:
            kinds = (SlotKind.RETAINED, SlotKind.OUTPUT)
            self._retain(output.id, backward, [Slot(op.index, k, 0) for k in kinds])

    def _retain(self, index: int, backward: int, slots: Sequence[Slot]) -> None:
        storage = self.storages[index]
        if storage is None:
            return
        category = storage.category
        if category is Category.WORKSPACE and storage.producer >= 0:
            category = Category.FEATURE_MAP
        new = [slot for slot in slots if slot not in storage.slots]
        self.storages[index] = dataclasses.replace(
            storage,
            category=category,
            slots=(*storage.slots, *new),
            backward_uses=tuple(sorted({*storage.backward_uses, backward})),
        )

    def _fit_gradients(self, op: Operation) -> None:
        """On the CPU a gradient may be the inner part of a padded array."""
        if op.function not in CONVOLUTIONS | POOLINGS:
            return
        nbytes = self._input_bytes(op)
        weights = {spec_bytes(spec) for spec in self._forward(op).specs[1:]}
        for event in self.groups[op.index]:
            storage = self.storages[event - 1] if event > 0 else None
            if storage is None or storage.slots or storage.freed_at < 0:
                continue
            if storage.nbytes > nbytes > 0 and storage.nbytes not in weights:
                self.storages[event - 1] = dataclasses.replace(storage, nbytes=nbytes)

    def _replace_temporaries(self, op: Operation) -> None:
        events = self.groups[op.index]
        gone = {s for s in passing(events) if not self._slots(s)}
        kept = [e for e in events if abs(e) - 1 not in gone]
        for storage in gone:
            self.storages[storage] = None
        needed = self._needed_while_running(op)
        if needed:
            self.storages.append(_workspace(len(self.storages), needed, op))
            new = len(self.storages)
            last = max((p for p, e in enumerate(kept) if e > 0), default=-1) + 1
            kept[last:last] = [new, -new]
        self.groups[op.index] = kept

    def _slots(self, index: int) -> tuple[Slot, ...]:
        storage = self.storages[index]
        return () if storage is None else storage.slots

    def _needed_while_running(self, op: Operation) -> int:
        needed = self._workspace_of(op)
        if op.phase is Phase.BACKWARD:
            if op.function == LRN:
                needed = max(needed, self._input_bytes(op))
            if self._adds_gradients(op):
                needed = max(needed, self._input_bytes(op))
        return needed

    def _workspace_of(self, op: Operation) -> int:
        return self.workspace_bytes if op.function in CONVOLUTIONS else 0

    def _adds_gradients(self, op: Operation) -> bool:
        """Whether its gradient completes that of an input with several uses."""
        forward = self._forward(op)
        if not forward.reads:
            return False
        users = self.gradients.get(forward.reads[0], [])
        return len(users) > 1 and max(users) == op.index

    def _recipe(self, recipe: Recipe) -> Recipe:
        op = self.profile.operations[recipe.operation]
        if op.function not in SERVED and not recipe.covers:
            return recipe
        made = (s for s in recipe.products if s not in recipe.inputs)
        products = [self.storages[s] for s in made]
        peak = sum(storage.nbytes for storage in products if storage is not None)
        return dataclasses.replace(recipe, peak_bytes=peak + self._workspace_of(op))


def _is_attribute(slot: Slot, operation: int, name: str | None) -> bool:
    return slot == Slot(operation, SlotKind.ATTRIBUTE, name) if name else False


def _output(profile: Profile, op: Operation) -> Storage | None:
    """The array that a function with one output has made."""
    for index in op.writes:
        storage = profile.storages[index]
        kinds = {slot.kind for slot in storage.slots if slot.operation == op.index}
        if kinds != {SlotKind.ATTRIBUTE} and storage.forward_uses:
            return storage
    return None


def _workspace(index: int, nbytes: int, op: Operation) -> Storage:
    return Storage(
        id=index,
        nbytes=nbytes,
        category=Category.WORKSPACE,
        label=op.label,
        producer=op.index,
        allocated_at=-1,
        freed_at=-1,
    )
