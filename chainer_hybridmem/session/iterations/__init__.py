"""What happens in an iteration.

``graph_hook`` turns Chainer's hooks into events of an ``iteration``:

- ``iteration_start`` begins one: a quiet one (``quiet_iterations``) where nothing is to
  be found out, else one with a guide and with what ``observation`` chooses.
  ``guide_switching`` finds another guide where that one does not fit.
- ``learning`` ends one: figures to ``iteration_history``, recordings to guides, and new
  plans where they help.
- ``older_graphs`` finds out what an iteration asks of those before it.
- ``out_of_memory`` explains an allocation that did not fit; ``overrun`` lets it exceed
  the limit once, to find out which limit will do.
"""
