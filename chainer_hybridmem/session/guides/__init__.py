"""What is known about each signature.

``guidebook`` has a ``guide`` for each sequence of operations that a session has
met. A guide has recordings, a ``forecast`` of what the iteration needs, a plan with its
``plan_arena`` and its ``plan_pace`` (when it is timed, when it may change), memory left
free for the program (``foreign_memory``). What the program does with maps
(``program_habits``) is known of all iterations that begin alike, a ``family``.
"""
