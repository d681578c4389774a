"""What is measured: ``python -m benchmarks list | run NAME ... | render``.

``catalogue`` names every benchmark. The module of a benchmark has two functions:
``add_arguments(parser)`` declares what it takes, ``main(options)`` measures, saves a
result with ``saving`` and returns the exit status.
"""
