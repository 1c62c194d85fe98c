# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.upstream.fusions import L2Norm as L2Norm, WrappedTorchNorm as WrappedTorchNorm
