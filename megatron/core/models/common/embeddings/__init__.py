# SPDX-License-Identifier: Apache-2.0
"""Token and position embeddings."""
