"""What trains a model within its limit.

The files here are the ends that a user sees: ``session`` is ``optimize()`` and the
``with`` statement, ``extension`` the Trainer's; ``results`` and ``report`` are what
they tell, and ``plan_cache`` keeps guides on disk. A room imports only those below:

- ``iterations``: what happens in an iteration, from its beginning to its end.
- ``planning``: makes plans for guides.
- ``guides``: what is known about each signature.
- ``setting``: what a session is given: options, device, thread, links, instruments.
"""
