# SPDX-License-Identifier: Apache-2.0
"""GPU kernels written in Triton, one file for each subject; docs/kernels.md says which operation runs in which.

Modules with kernels import triton, which only a CUDA build of torch brings: a function that a kernel replaces names it
in `launching.by_kernel`, and it is imported at the first call with tensors that it takes.
"""
