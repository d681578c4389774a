"""The version of the package, which kept plans name too."""

__version__ = '0.1.0'
