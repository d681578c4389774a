"""What trains a model within its limit.

The way of an iteration through these files:

- ``session`` is ``optimize()`` and the ``with`` statement, ``extension`` the Trainer's;
  ``options`` are what they are told, ``results``, ``session_statistics`` and ``report``
  what they tell.
- ``graph_hook`` turns Chainer's hooks into events of an ``iteration``.
- ``iteration_start`` begins one: ``quiet_iterations`` where nothing is to be found
  out, else with the ``guide`` that ``known_signatures`` have, and with what
  ``observation`` chooses of the ``measuring_instruments``. ``guide_switching`` finds
  another guide where that one does not fit.
- ``learning`` ends one: figures to ``iteration_history``, recordings to guides, and
  plans from ``planning``, which ``plan_maker`` makes.
- A guide has a ``plan_pace`` (when the plan is timed and may change), a ``plan_arena``,
  ``foreign_memory`` (left free for the program) and ``program_habits``. ``plan_cache``
  keeps guides on disk.
- ``out_of_memory`` explains an allocation that did not fit, ``forecast`` tells what
  iterations will need.
"""
