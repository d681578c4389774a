"""What happens in an iteration.

``loop`` turns Chainer's hooks into events of an ``iteration``: it begins one (quietly
where nothing is to be found out, else with a guide and with what ``observation``
chooses), finds another guide where that one does not fit, and ends it.

- ``learning`` takes iterations that have ended: figures to ``iteration_history``,
  recordings to guides, and new plans where they help.
- ``out_of_memory`` explains an allocation that did not fit; ``overrun`` lets it exceed
  the limit once, to find out which limit will do.
"""
