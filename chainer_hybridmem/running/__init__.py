"""Programs that do not know of us: ``hybridmem run``, ``verify``, ``profile``.

* ``step_recorder``: records the step that a program repeats
* ``limit_finder``: a limit that is a percentage, or ``auto``
* ``follower``: a session around whatever the program trains
* ``watchers``: followers that find something out, and end the program then
* ``starting``: what each process of a run begins and ends with
"""
