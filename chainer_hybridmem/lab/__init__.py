"""What compares: other planners, other pools, and problems of other programs.

* ``planners``: those of other papers
* ``pools``: how other allocators would serve an iteration
* ``importing``: files of other programs
* ``contest``: planners and layouts against the best published answers
"""
