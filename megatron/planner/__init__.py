# SPDX-License-Identifier: Apache-2.0
"""Estimates of what a run will need: memory and floating-point operations, without devices or processes."""
