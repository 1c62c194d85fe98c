# SPDX-License-Identifier: Apache-2.0
"""Settings of a training run, one subject per file; `container.RunConfig` holds them all."""
