# SPDX-License-Identifier: Apache-2.0
"""Steps and ranks that fail: a step is computed again, its first bad value is named, what was consumed is written down,
and the ranks that are left save what they hold."""
