"""``record_inference()``: the memory of a forward pass without backward."""

from __future__ import annotations

from typing import Any

import chainer

from chainer_hybridmem.chainer_access import owners
from chainer_hybridmem.devices import open_device
from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.recording.inference_recorder import InferenceRecorder
from chainer_hybridmem.records.profile import Category, Profile

_NO_LIMIT_BYTES = 2**50


def record_inference(model: chainer.Link, *args: Any, **kwargs: Any) -> Profile:
    """Records the memory of one forward pass at test time.

    The model is called under ``chainer.no_backprop_mode()`` and with
    ``chainer.config.train`` off; once more before, if it has parameters without
    a shape.

    >>> from chainer_hybridmem import pools
    >>> profile = hybridmem.record_inference(model, x)
    >>> trace = pools.forward_trace(profile, pools.Lifetimes.LAST_USE)
    >>> pools.exact(trace).footprint_bytes, pools.blob_bytes(profile)

    Args:
        model: On the CPU or a GPU.
        args: For the model.
        kwargs: For the model.

    Returns:
        Profile: Of forward operations only. What the model has returned stays to
        its end.

    Raises:
        OptionError: If the model is no link.
        SessionError: If it calls no function of Chainer, or if NumPy's memory is
            watched already.
    """
    if not isinstance(model, chainer.Link):
        raise OptionError(
            f'model is a {type(model).__name__}; a chainer.Link is needed.'
        )
    with chainer.using_config('train', False), chainer.no_backprop_mode():
        if any(parameter.array is None for parameter in model.params()):
            model(*args, **kwargs)
        owners.bring_home(model)
        device = open_device(_device_of(model), _NO_LIMIT_BYTES)
        try:
            parameters = [
                array
                for kind, array in owners.permanent_arrays(model)
                if kind is Category.PARAMETER
            ]
            device.memory.adopt(parameters)
            device.memory.install(lambda missing_bytes: None)
            try:
                recorder = InferenceRecorder(device, parameters)
                recorder.expect((args, kwargs))
                with recorder:
                    result = model(*args, **kwargs)
                profile = recorder.build()
                del result
            finally:
                device.memory.uninstall()
        finally:
            device.close()
    return profile


def _device_of(model: chainer.Link) -> str:
    if isinstance(model.device, chainer.backend.GpuDevice):
        return f'cuda:{model.device.device.id}'
    return 'cpu'
