# SPDX-License-Identifier: Apache-2.0
"""The programs: each module reads a command line, calls into the library, and prints. tools/ only starts them."""
