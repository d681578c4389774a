"""What is known about each signature.

``guidebook`` has a ``guide`` for each sequence of operations that a session has
met. A guide has recordings, a ``forecast`` of what the iteration needs, and a plan with
its arena, its pace (when it is timed, when it may change) and memory left free for the
program. What the program does with maps, its habits, is known of all iterations that
begin alike, a family. ``operation_key`` tells operations apart; ``profiling_plan`` is
what iterations follow while they are profiled.
"""
