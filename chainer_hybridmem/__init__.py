"""Trains Chainer models whose feature maps do not fit the memory they are given.

>>> import chainer_hybridmem as hybridmem
>>> with hybridmem.optimize(model, memory_limit='16GiB') as session:
...     trainer.run()
>>> print(session.report())

Importing the package imports neither Chainer nor CuPy; names that need them load
them when they are first used. If Chainer is imported later, it is made to work
on current Python and NumPy (:mod:`chainer_hybridmem.training.chainer_access.compat`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from chainer_hybridmem.training.chainer_access import compat
from chainer_hybridmem.version import __version__ as __version__

compat.install()

if TYPE_CHECKING:
    from chainer_hybridmem.errors import (
        FormatError,
        HostFullError,
        HybridMemoryError,
        InfeasibleError,
        OptionError,
        OutOfMemoryError,
        PlanError,
        PlannerError,
        ProfileMismatchError,
        SessionError,
        SwapStoreError,
        UnknownNameError,
        VerificationError,
    )
    from chainer_hybridmem.extras.inference_recorder import record_inference
    from chainer_hybridmem.extras.inference_session import optimize_inference
    from chainer_hybridmem.extras.memory_profile import profile_memory
    from chainer_hybridmem.forecasting.batch_estimate import estimate
    from chainer_hybridmem.forecasting.largest_batch import largest_batch
    from chainer_hybridmem.planning.planners import make_plan
    from chainer_hybridmem.planning.records.library import (
        load_plan,
        load_profile,
        load_timeline,
        save,
    )
    from chainer_hybridmem.planning.simulation import simulate
    from chainer_hybridmem.profiles import shipped_profiles
    from chainer_hybridmem.training.recompute.trust import recomputable
    from chainer_hybridmem.training.session.extension import HybridMemory
    from chainer_hybridmem.training.session.session import Session, optimize

__all__ = [
    'FormatError',
    'HostFullError',
    'HybridMemory',
    'HybridMemoryError',
    'InfeasibleError',
    'OptionError',
    'OutOfMemoryError',
    'PlanError',
    'PlannerError',
    'ProfileMismatchError',
    'Session',
    'SessionError',
    'SwapStoreError',
    'UnknownNameError',
    'VerificationError',
    'estimate',
    'largest_batch',
    'load_plan',
    'load_profile',
    'load_timeline',
    'make_plan',
    'optimize',
    'optimize_inference',
    'profile_memory',
    'recomputable',
    'record_inference',
    'save',
    'shipped_profiles',
    'simulate',
]

_HOMES = {
    'FormatError': 'errors',
    'HostFullError': 'errors',
    'HybridMemory': 'training.session.extension',
    'HybridMemoryError': 'errors',
    'InfeasibleError': 'errors',
    'OptionError': 'errors',
    'OutOfMemoryError': 'errors',
    'PlanError': 'errors',
    'PlannerError': 'errors',
    'ProfileMismatchError': 'errors',
    'Session': 'training.session.session',
    'SessionError': 'errors',
    'SwapStoreError': 'errors',
    'UnknownNameError': 'errors',
    'VerificationError': 'errors',
    'estimate': 'forecasting.batch_estimate',
    'largest_batch': 'forecasting.largest_batch',
    'load_plan': 'planning.records.library',
    'load_profile': 'planning.records.library',
    'load_timeline': 'planning.records.library',
    'make_plan': 'planning.planners',
    'optimize': 'training.session.session',
    'optimize_inference': 'extras.inference_session',
    'profile_memory': 'extras.memory_profile',
    'recomputable': 'training.recompute.trust',
    'record_inference': 'extras.inference_recorder',
    'save': 'planning.records.library',
    'shipped_profiles': 'profiles',
    'simulate': 'planning.simulation',
}
_NEED_CHAINER = frozenset(
    {'HybridMemory', 'Session', 'optimize', 'profile_memory', 'recomputable'}
    | {'estimate', 'largest_batch', 'optimize_inference', 'record_inference'}
)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    if name in _NEED_CHAINER:
        compat.import_chainer()
    return getattr(importlib.import_module(f'{__name__}.{home}'), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
