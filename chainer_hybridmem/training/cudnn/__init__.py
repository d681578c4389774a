"""cuDNN 9 for a CuPy that has none: what ``cupy.cudnn`` and ``cupy.cuda.cudnn`` were.

CuPy 14 has no cuDNN any more, and Chainer asks CuPy for it. The C library of today
still exports the older interface that Chainer's functions are written for; of recurrent
networks only the newer form is left. So this calls the library, by ctypes, and has the
names of CuPy 13:

* ``cupy.cuda.cudnn``: the C functions and enumerations (``functions``, ``constants``);
* ``cupy.cudnn``: what they do to arrays (``convolutions``, ``layers``,
  ``normalization``, ``recurrent``, above ``descriptors``).

``library`` finds and loads the library, on first use; ``modules`` makes the two
importable. It is of use without a session.
"""
