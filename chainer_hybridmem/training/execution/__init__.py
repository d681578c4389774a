"""Plan to actions on the live graph."""

from chainer_hybridmem.training.execution.executor import Executor
from chainer_hybridmem.training.execution.table import ActionTable, compile_plan

__all__ = ['ActionTable', 'Executor', 'compile_plan']
