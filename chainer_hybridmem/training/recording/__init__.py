"""Hook and memory events of one iteration, turned into a profile."""

from chainer_hybridmem.training.recording.recorder import Recorder

__all__ = ['Recorder']
