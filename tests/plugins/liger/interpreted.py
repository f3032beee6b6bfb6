"""Liger's kernels on the CPU, in Triton's interpreter: for a process whose environment has TRITON_INTERPRET=1.

Two things are missing there. Numbers reach a kernel as Python's, which have no `to`; and functions of CUDA's library
give nothing.
"""

import liger_kernel.ops.geglu
import liger_kernel.ops.rms_norm
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_plain = interpreter._implicit_cvt


def _converted(argument):
    if not isinstance(argument, float):
        return _plain(argument)
    return tl.tensor(interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)


interpreter._implicit_cvt = _converted
liger_kernel.ops.rms_norm.rsqrt = lambda x: tl.rsqrt(x)
liger_kernel.ops.geglu.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1
