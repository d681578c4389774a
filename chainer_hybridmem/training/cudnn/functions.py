"""The C functions of cuDNN by the names of ``cupy.cuda.cudnn``.

Note: [signatures]
    A letter stands for an argument: ``h`` a handle, ``p`` a pointer or descriptor,
    ``i`` an int, ``u`` an unsigned one, ``z`` a size, ``q`` a seed, ``f`` and ``d``
    floats. A capital letter is given by the function, through a pointer, and returned
    here. Addresses are ints; 0 and None are NULL. What takes a handle runs in CuPy's
    current stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

from chainer_hybridmem.training.cudnn.library import LibraryError, load

_TYPES: dict[str, Any] = {
    'h': ctypes.c_void_p,
    'p': ctypes.c_void_p,
    'i': ctypes.c_int,
    'u': ctypes.c_uint,
    'z': ctypes.c_size_t,
    'q': ctypes.c_ulonglong,
    'f': ctypes.c_float,
    'd': ctypes.c_double,
}
_DESCRIPTORS = (
    *('Tensor', 'Filter', 'Convolution', 'Pooling', 'Activation', 'Dropout'),
    *('SpatialTransformer', 'RNN', 'RNNData'),
)
SIGNATURES = {
    'Create': 'P',
    'Destroy': 'h',
    'SetStream': 'hp',
    'QueryRuntimeError': 'hIip',
    **{f'Create{name}Descriptor': 'P' for name in _DESCRIPTORS},
    **{f'Destroy{name}Descriptor': 'p' for name in _DESCRIPTORS},
    'SetTensor4dDescriptor': 'piiiiii',
    'SetTensorNdDescriptor': 'piipp',
    'GetTensorNdDescriptor': 'piIIpp',
    'AddTensor': 'hpppppp',
    'SetFilter4dDescriptor': 'piiiiii',
    'SetFilterNdDescriptor': 'piiip',
    'SetConvolutionNdDescriptor': 'pipppii',
    'SetConvolutionMathType': 'pi',
    'SetConvolutionGroupCount': 'pi',
    'GetConvolutionNdForwardOutputDim': 'pppip',
    'GetConvolutionForwardAlgorithm_v7': 'hppppiIp',
    'GetConvolutionBackwardDataAlgorithm_v7': 'hppppiIp',
    'GetConvolutionBackwardFilterAlgorithm_v7': 'hppppiIp',
    'FindConvolutionForwardAlgorithmEx': 'hpppppppiIppz',
    'FindConvolutionBackwardDataAlgorithmEx': 'hpppppppiIppz',
    'FindConvolutionBackwardFilterAlgorithmEx': 'hpppppppiIppz',
    'GetConvolutionForwardWorkspaceSize': 'hppppiZ',
    'GetConvolutionBackwardDataWorkspaceSize': 'hppppiZ',
    'GetConvolutionBackwardFilterWorkspaceSize': 'hppppiZ',
    'ConvolutionForward': 'hppppppipzppp',
    'ConvolutionBackwardData': 'hppppppipzppp',
    'ConvolutionBackwardFilter': 'hppppppipzppp',
    'SetPoolingNdDescriptor': 'piiippp',
    'GetPoolingNdForwardOutputDim': 'ppip',
    'PoolingForward': 'hppppppp',
    'PoolingBackward': 'hppppppppppp',
    'SetActivationDescriptor': 'piid',
    'ActivationForward': 'hppppppp',
    'ActivationBackward': 'hppppppppppp',
    'SoftmaxForward': 'hiipppppp',
    'SoftmaxBackward': 'hiipppppppp',
    'DeriveBNTensorDescriptor': 'ppi',
    'GetBatchNormalizationForwardTrainingExWorkspaceSize': 'hiipppppZ',
    'GetBatchNormalizationTrainingExReserveSpaceSize': 'hiippZ',
    'GetBatchNormalizationBackwardExWorkspaceSize': 'hiipppppppZ',
    'BatchNormalizationForwardTrainingEx': 'hiipppppppppppdppdppppzpz',
    'BatchNormalizationForwardInference': 'hipppppppppppd',
    'BatchNormalizationBackwardEx': 'hiipppppppppppppppppppdppppzpz',
    'DropoutGetStatesSize': 'hZ',
    'DropoutGetReserveSpaceSize': 'pZ',
    'SetDropoutDescriptor': 'phfpzq',
    'DropoutForward': 'hppppppz',
    'DropoutBackward': 'hppppppz',
    'SetSpatialTransformerNdDescriptor': 'piiip',
    'SpatialTfGridGeneratorForward': 'hppp',
    'SpatialTfGridGeneratorBackward': 'hppp',
    'SpatialTfSamplerForward': 'hpppppppp',
    'SpatialTfSamplerBackward': 'hppppppppppppp',
    'SetRNNDescriptor_v8': 'piiiiiiiiiiiipu',
    'SetRNNDataDescriptor': 'piiiiipp',
    'GetRNNTempSpaceSizes': 'hpipZZ',
    'GetRNNWeightSpaceSize': 'hpZ',
    'GetRNNWeightParams': 'hpizpipPpP',
    'RNNForward': 'hpipppppppppppzpzpzp',
    'RNNBackwardData_v8': 'hpppppppppppppppzpzpzp',
    'RNNBackwardWeights_v8': 'hpipppppppzpzpzp',
}
_NOT_IN_A_STREAM = ('Create', 'Destroy', 'SetStream')


class CuDNNError(RuntimeError):
    """A function of cuDNN has failed.

    Attributes:
        status (int): What it has returned.
    """

    def __init__(self, status: int, told: str, infos: Sequence[str] = ()) -> None:
        super().__init__(status, told, infos)
        self.status = status
        self._told = told
        self._infos = list(infos)

    def add_infos(self, infos: Sequence[str]) -> None:
        """Has more lines told."""
        self._infos += infos

    def __str__(self) -> str:
        return '\n  '.join([f'cuDNN: {self._told}', *self._infos])


def getVersion() -> int:
    """The library's version, 92800 for 9.28.0."""
    function = load().cudnnGetVersion
    function.restype = ctypes.c_size_t
    return int(function())


def is_available() -> bool:
    """Whether there is a library that this CuPy can use."""
    try:
        check_names()
    except LibraryError:
        return False
    return True


@functools.cache
def check_names() -> None:
    """Looks for every function, and makes one descriptor of each part of the library.

    Raises:
        LibraryError: If there is no library, or it lacks something.
    """
    library = load()
    for name in ('GetVersion', 'GetErrorString', *SIGNATURES):
        if not hasattr(library, f'cudnn{name}'):
            raise LibraryError(
                f'{library._name} lacks cudnn{name}: install another cuDNN 9.'
            )
    for kind in ('Tensor', 'Convolution', 'RNN'):
        descriptor = ctypes.c_void_p()
        create = getattr(library, f'cudnnCreate{kind}Descriptor')
        status = create(ctypes.byref(descriptor))
        if status:
            raise LibraryError(f'{library._name} is not whole: {_tell(status)}.')
        getattr(library, f'cudnnDestroy{kind}Descriptor')(descriptor)


def _tell(status: int) -> str:
    describe = load().cudnnGetErrorString
    describe.restype, describe.argtypes = ctypes.c_char_p, [ctypes.c_int]
    return f'{describe(status).decode()} ({status})'


def _fail(status: int, name: str) -> None:
    library = load()
    told = f'cudnn{name} ended with {_tell(status)}'
    detail = ctypes.create_string_buffer(1024)
    with contextlib.suppress(AttributeError):
        library.cudnnGetLastErrorString(detail, ctypes.c_size_t(len(detail)))
    if detail.value:
        told = f'{told}: {detail.value.decode(errors="replace")}'
    raise CuDNNError(status, told)


def _bind(name: str) -> Callable[..., Any]:
    """A function that is looked up when it is called for the first time."""
    signature = SIGNATURES[name]
    handle = -1 if name in _NOT_IN_A_STREAM else signature.find('h')
    returned = [i for i, letter in enumerate(signature) if letter.isupper()]
    function: Any = None

    def find() -> Any:
        nonlocal function
        check_names()
        found = getattr(load(), f'cudnn{name}')
        found.argtypes = [
            ctypes.c_void_p if letter.isupper() else _TYPES[letter]
            for letter in signature
        ]
        function = found
        return found

    def call(*args: Any) -> None:
        if len(args) != len(signature):  # C ignores one too many
            raise TypeError(
                f'cudnn{name} takes {len(signature) - len(returned)} arguments, not '
                f'{len(args) - len(returned)}'
            )
        if handle >= 0:
            _follow_stream(args[handle])
        status = (function or find())(*args)
        if status:
            _fail(status, name)

    if not returned:
        return call
    kinds = [_TYPES[signature[i].lower()] for i in returned]

    def ask(*args: Any) -> Any:
        values = [kind() for kind in kinds]
        everything = list(args)
        for position, value in zip(returned, values, strict=True):
            everything.insert(position, ctypes.addressof(value))
        call(*everything)
        if len(values) == 1:
            return values[0].value
        return tuple(value.value for value in values)

    return ask


_streams: dict[int, int] = {}  # of each handle, the one that it has been given last


def _follow_stream(handle: int) -> None:
    import cupy

    stream = cupy.cuda.get_current_stream().ptr
    if _streams.get(handle) != stream:
        setStream(handle, stream)


def setStream(handle: int, stream: int) -> None:
    """Has what follows run in a stream, until CuPy's current one is another."""
    _set_stream(handle, stream)
    _streams[handle] = stream


def _cupy_name(name: str) -> str:
    # RNNForward stays as it is
    return name if name.startswith('RNN') else name[0].lower() + name[1:]


FUNCTIONS = {_cupy_name(name): _bind(name) for name in SIGNATURES}
_set_stream, _destroy = FUNCTIONS['setStream'], FUNCTIONS['destroy']


def destroy(handle: int) -> None:
    """Destroys a handle."""
    _streams.pop(handle, None)  # another one may get its address
    _destroy(handle)


FUNCTIONS |= {'setStream': setStream, 'destroy': destroy}
