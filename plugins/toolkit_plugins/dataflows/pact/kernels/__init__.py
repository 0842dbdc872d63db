"""Triton kernels of the data flow's elementwise operations: one program a few rows, one pass over memory.

Codes, scales and g are those of `nvfp4_rows.quantize_rows`, bit for bit, for the same float32 values. Importing a
module of this package needs Triton, and compiles nothing.
"""
