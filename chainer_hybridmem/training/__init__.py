"""Trains within a limit: Chainer's graph, the devices, and what follows a plan.

* ``cudnn``: cuDNN 9 for CuPy 14
* ``devices``: memory, copies, clock and offsets of NumPy and CuPy, behind one protocol
* ``chainer_access``: reads and writes Chainer's private fields, and repairs Chainer
* ``recompute``, ``splitting``: run functions again, and in parts
* ``execution``: follows a plan on the running graph
* ``recording``: makes profiles and measured timelines of running iterations
* ``session``: what a session learns, and when it plans
"""
