# SPDX-License-Identifier: Apache-2.0
"""From a command line to a RunConfig: declarations, parser, derived values, checks, report. No torch."""
