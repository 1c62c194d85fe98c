# SPDX-License-Identifier: Apache-2.0
"""Mixers whose state has a constant size: Mamba-2, gated delta nets, Kimi delta attention."""
