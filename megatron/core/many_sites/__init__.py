# SPDX-License-Identifier: Apache-2.0
"""Training on several sites that a slow line connects: local steps, and an exchange of weights now and then."""
