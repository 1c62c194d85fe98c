# SPDX-License-Identifier: Apache-2.0
"""Sequences of unequal length: the layout of their tokens in a call, and what layers keep of them between calls."""
