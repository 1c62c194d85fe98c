# SPDX-License-Identifier: Apache-2.0
"""The one place that calls NVIDIA's Transformer Engine: the package and its recipes, and layers that compute by it."""
