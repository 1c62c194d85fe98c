# SPDX-License-Identifier: Apache-2.0
"""Parts that models share: embeddings, output layer, loss."""
