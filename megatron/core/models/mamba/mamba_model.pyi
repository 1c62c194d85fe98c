# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.models.hybrid.hybrid_model import MambaModel as MambaModel
