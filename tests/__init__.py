"""The tests; a package, so that benchmarks find ``tests.support``."""
