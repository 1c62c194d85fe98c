# SPDX-License-Identifier: Apache-2.0
"""GPU kernels written in Triton, one file for each subject; docs/kernels.md says which operation runs in which.

Modules with kernels import triton, which only a CUDA build of torch brings: who uses one asks
`launching.uses_kernels(tensor)` first and imports it then.
"""
