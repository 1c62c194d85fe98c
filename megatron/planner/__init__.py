# SPDX-License-Identifier: Apache-2.0
"""What a run will need before it starts: memory and floating-point operations, without devices or processes."""
