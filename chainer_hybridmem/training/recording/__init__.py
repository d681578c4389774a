"""Hook and memory events of one iteration, turned into a profile."""

from chainer_hybridmem.training.recording.recorder import Detail, Recorder

__all__ = ['Detail', 'Recorder']
