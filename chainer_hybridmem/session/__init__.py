"""What trains a model within its limit.

The files here are the ends that a user sees: ``session`` is ``optimize()`` and the
``with`` statement, ``extension`` the Trainer's; ``results``, ``session_statistics``,
``report`` and ``progress_lines`` are what they tell. A room imports only those below:

- ``iterations``: what happens in an iteration, from its beginning to its end.
- ``cache``: guides kept on disk.
- ``planning``: makes plans for guides.
- ``guides``: what is known about each signature.
- ``setting``: what a session is given: options, device, thread, links, instruments.
"""
