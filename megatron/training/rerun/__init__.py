# SPDX-License-Identifier: Apache-2.0
"""Numbers gone bad: a step is computed again, its first bad value is named, and what was consumed is written down."""
