# SPDX-License-Identifier: Apache-2.0
"""Upstream's names for decoders that a pattern of letters describes; the model is that of GPT (models/gpt)."""
